import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    """What engine checks found, by profile."""

    dependencies = [
        ("catalog", "0008_key_reach"),
        ("nodes", "0013_notices"),
    ]

    operations = [
        migrations.CreateModel(
            name="EngineCheck",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("profile_name", models.CharField(blank=True, max_length=200)),
                (
                    "fingerprint",
                    models.CharField(blank=True, help_text="of the profile; empty is unknown", max_length=16),
                ),
                ("engine", models.CharField(max_length=40)),
                ("engine_version", models.CharField(blank=True, max_length=100)),
                ("gpu", models.CharField(blank=True, max_length=100)),
                ("replica", models.UUIDField()),
                ("job", models.UUIDField()),
                ("findings", models.JSONField(default=list)),
                ("checked_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "model",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="engine_checks",
                        to="catalog.model",
                    ),
                ),
            ],
            options={
                "ordering": ["-checked_at", "-id"],
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("model", "fingerprint"), name="a_profile_has_one_engine_check"
                    )
                ],
            },
        ),
    ]
