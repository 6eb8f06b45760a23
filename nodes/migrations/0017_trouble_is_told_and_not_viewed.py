from typing import Any

from django.db import migrations


def forget_permission(apps: Any, schema_editor: Any) -> None:
    """Django adds permissions, and removes none. A role that had it loses nothing: it opened no page."""
    permissions = apps.get_model("auth", "Permission").objects.using(schema_editor.connection.alias)
    permissions.filter(content_type__app_label="nodes", codename="view_trouble").delete()


class Migration(migrations.Migration):
    dependencies = [
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
        ("nodes", "0016_samples_to_roll_up"),
    ]

    operations = [
        migrations.AlterModelOptions(name="trouble", options={"default_permissions": ()}),
        migrations.RunPython(forget_permission, migrations.RunPython.noop),
    ]
