from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("catalog", "0006_limits"),
    ]

    operations = [
        migrations.AlterField(
            model_name="key",
            name="scope",
            field=models.CharField(
                choices=[
                    ("inference", "/v1/ alone"),
                    ("manage", "/v1/ and, as its owner, /api/"),
                    ("metrics", "/metrics alone"),
                ],
                default="inference",
                max_length=10,
            ),
        ),
    ]
