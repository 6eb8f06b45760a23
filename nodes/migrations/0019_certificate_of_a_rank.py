from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0018_key_of_a_job"),
    ]

    operations = [
        migrations.AddField(
            model_name="rank",
            name="certificate",
            field=models.CharField(
                blank=True,
                default="",
                help_text="SHA-256 of the one that its port shows; empty: plain HTTP",
                max_length=64,
            ),
            preserve_default=False,
        ),
    ]
