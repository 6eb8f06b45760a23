from django.contrib.auth.management import create_permissions
from django.db import migrations

LOOKS, MANAGES = "view_job", ("add_job", "change_job")
ROLES = {"viewer": (LOOKS,), "operator": (LOOKS, *MANAGES), "admin": (LOOKS, *MANAGES)}


def _groups(apps):
    """Each role that is still there, and what it may do about jobs."""
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
    """All roles see jobs; operators ask for them, and have them stopped."""

    dependencies = [
        ("llmgw", "0005_weights"),
        ("nodes", "0011_jobs"),
    ]

    operations = [migrations.RunPython(give, take_back)]
