from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0008_joining"),
    ]

    operations = [
        migrations.AddField(
            model_name="rank",
            name="attempts",
            field=models.JSONField(default=list, help_text="its last processes that have ended"),
        ),
    ]
