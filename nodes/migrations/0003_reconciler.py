from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0002_moving"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="cluster",
            options={"verbose_name": "reconciler", "verbose_name_plural": "reconciler"},
        ),
    ]
