from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0004_meeting"),
    ]

    operations = [
        migrations.AddField(
            model_name="rank",
            name="context_length",
            field=models.PositiveIntegerField(
                help_text="tokens that one request may have, by the engine's own word", null=True
            ),
        ),
    ]
