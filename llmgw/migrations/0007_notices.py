from django.contrib.auth.management import create_permissions
from django.db import migrations

LOOKS, MANAGES = "view_webhook", ("add_webhook", "change_webhook", "delete_webhook")
ROLES = {"viewer": (LOOKS,), "operator": (LOOKS,), "admin": (LOOKS, *MANAGES)}


def _groups(apps):
    """Each role that is still there, and what it may do about webhooks."""
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
    """All roles see webhooks; admins say where notices go to, as these leave the cluster."""

    dependencies = [
        ("llmgw", "0006_jobs"),
        ("nodes", "0013_notices"),
    ]

    operations = [migrations.RunPython(give, take_back)]
