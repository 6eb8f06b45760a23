from django.contrib.auth.management import create_permissions
from django.db import migrations

LOOKS, ADDS, REMOVES = "view_jointoken", "add_node", "delete_node"
ROLES = {"viewer": (LOOKS,), "operator": (LOOKS,), "admin": (LOOKS, ADDS, REMOVES)}


def _groups(apps):
    """Each role that is still there, and what it may do about machines that join."""
    for group in apps.get_model("auth", "Group").objects.filter(name__in=ROLES):
        found = apps.get_model("auth", "Permission").objects.filter(
            content_type__app_label="nodes", codename__in=ROLES[group.name]
        )
        yield group, found


def give(apps, schema_editor):
    # Django makes permissions when all migrations are through, which is later than now.
    config = apps.get_app_config("nodes")
    config.models_module = True
    create_permissions(config, verbosity=0, apps=apps, using=schema_editor.connection.alias)
    config.models_module = None
    for group, permissions in _groups(apps):
        group.permissions.add(*permissions)


def take_back(apps, schema_editor):
    for group, permissions in _groups(apps):
        group.permissions.remove(*permissions)


class Migration(migrations.Migration):
    """Admins add and remove nodes, which see what is asked of models; all roles see who let a machine join."""

    dependencies = [
        ("llmgw", "0003_usage"),
        ("nodes", "0008_joining"),
    ]

    operations = [migrations.RunPython(give, take_back)]
