from django.db import migrations, models
from django.db.models.functions import Now


def revoke_what_would_open_v1(apps, schema_editor):
    apps.get_model("catalog", "Key").objects.filter(scope="metrics", revoked_at=None).update(revoked_at=Now())


class Migration(migrations.Migration):
    """On the way back a key for /metrics is revoked: the code of before knows no scope but manage, and would
    let it open /v1/."""

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
        migrations.RunPython(migrations.RunPython.noop, revoke_what_would_open_v1),
    ]
