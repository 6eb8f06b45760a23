from django.db import migrations


def make(apps, schema_editor):
    apps.get_model("catalog", "Revision").objects.get_or_create(pk=1)


class Migration(migrations.Migration):
    """The counter's one row is there before anybody asks, so that reading it never writes."""

    dependencies = [("catalog", "0001_first")]

    operations = [migrations.RunPython(make, migrations.RunPython.noop)]
