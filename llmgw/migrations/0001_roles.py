from django.contrib.auth.management import create_permissions
from django.db import migrations

VIEWER = {
    "catalog": {"view_event", "view_key", "view_model"},
    "nodes": {"view_node", "view_orphan", "view_replica"},
}
OPERATOR = {
    "catalog": {"add_key", "add_model", "change_key", "change_model", "delete_model", "see_env"},
    "nodes": {"change_node", "change_replica"},
}
ADMIN = {
    "auth": {f"{verb}_{what}" for verb in ("add", "change", "delete", "view") for what in ("group", "user")},
    "catalog": {"any_key"},
}
ROLES = {"viewer": (VIEWER,), "operator": (VIEWER, OPERATOR), "admin": (VIEWER, OPERATOR, ADMIN)}


def _permissions(apps, role):
    Permission = apps.get_model("auth", "Permission")
    for part in ROLES[role]:
        for app, names in part.items():
            found = list(Permission.objects.filter(content_type__app_label=app, codename__in=names))
            assert len(found) == len(names), f"{app} lacks some of {sorted(names)}"
            yield from found


def give(apps, schema_editor):
    """A group that is there already keeps what it has, and gets what the role needs."""
    # Django makes permissions when all migrations are through, which is later than now.
    for app in ("auth", "catalog", "nodes"):
        config = apps.get_app_config(app)
        config.models_module = True
        create_permissions(config, verbosity=0, apps=apps, using=schema_editor.connection.alias)
        config.models_module = None
    for role in ROLES:
        group, _ = apps.get_model("auth", "Group").objects.get_or_create(name=role)
        group.permissions.add(*_permissions(apps, role))


def take_back(apps, schema_editor):
    """A group that has members, or more than was given here, is an operator's own by now, and stays."""
    for role in ROLES:
        given = {permission.pk for permission in _permissions(apps, role)}
        for group in apps.get_model("auth", "Group").objects.filter(name=role, user=None):
            if {permission.pk for permission in group.permissions.all()} <= given:
                group.delete()


class Migration(migrations.Migration):
    """Three roles as groups: viewer looks, operator runs the catalog and what serves it, admin people as well."""

    initial = True

    dependencies = [
        ("auth", "0012_alter_user_first_name_max_length"),
        ("catalog", "0004_permissions"),
        ("contenttypes", "0002_remove_content_type_name"),
        ("nodes", "0001_first"),
    ]

    operations = [migrations.RunPython(give, take_back)]
