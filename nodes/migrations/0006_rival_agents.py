from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0005_context_length"),
    ]

    operations = [
        migrations.AddField(
            model_name="node",
            name="rival_at",
            field=models.DateTimeField(editable=False, null=True),
        ),
    ]
