from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0003_reconciler"),
    ]

    operations = [
        migrations.AddField(
            model_name="rank",
            name="meeting",
            field=models.CharField(
                blank=True, default="", help_text="where it waits for the other ranks", max_length=80
            ),
            preserve_default=False,
        ),
    ]
