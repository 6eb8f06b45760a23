from django.contrib.auth.management import create_permissions
from django.db import migrations

LOOKS, ACTS = "view_cluster", "change_cluster"
ROLES = {"viewer": (LOOKS,), "operator": (LOOKS, ACTS), "admin": (LOOKS, ACTS)}


def _groups(apps):
    """Each role that is still there, and what it needs for the reconciler."""
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
    """Viewers see what the reconciler will do; operators pause it, and say yes to what it holds back."""

    dependencies = [
        ("llmgw", "0001_roles"),
        ("nodes", "0003_reconciler"),
    ]

    operations = [migrations.RunPython(give, take_back)]
