import django.db.models.deletion
import django.db.models.functions.datetime
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):
    """Work that operators ask for: benches and engine checks."""

    dependencies = [
        ("catalog", "0008_key_reach"),
        ("nodes", "0010_weights"),
    ]

    operations = [
        migrations.CreateModel(
            name="Job",
            fields=[
                (
                    "id",
                    models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[("bench", "bench"), ("engine_check", "engine check")], max_length=20
                    ),
                ),
                ("model_name", models.CharField(max_length=200)),
                ("replica", models.UUIDField(null=True)),
                ("options", models.JSONField(default=dict)),
                ("by", models.CharField(max_length=150)),
                ("why", models.TextField(blank=True)),
                ("asked_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("queued", "Queued"),
                            ("running", "Running"),
                            ("done", "Done"),
                            ("failed", "Failed"),
                            ("stopped", "Stopped"),
                        ],
                        default="queued",
                        max_length=10,
                    ),
                ),
                ("claimed_at", models.DateTimeField(null=True)),
                ("heartbeat_at", models.DateTimeField(null=True)),
                ("ended_at", models.DateTimeField(null=True)),
                ("stop_asked_at", models.DateTimeField(null=True)),
                (
                    "progress",
                    models.JSONField(default=dict, help_text="part (0 to 1), say, and numbers of the moment"),
                ),
                ("result", models.JSONField(default=dict)),
                (
                    "problem",
                    models.TextField(blank=True, help_text="why it failed, or by whom it was stopped"),
                ),
                (
                    "fingerprint",
                    models.CharField(
                        blank=True, help_text="of the profile that it was done to", max_length=16
                    ),
                ),
                ("engine", models.CharField(blank=True, max_length=40)),
                ("engine_version", models.CharField(blank=True, max_length=100)),
                ("gpu", models.CharField(blank=True, max_length=100)),
                (
                    "model",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="jobs",
                        to="catalog.model",
                    ),
                ),
            ],
            options={
                "ordering": ["-asked_at", "-id"],
                "default_permissions": ("view", "add", "change"),
                "indexes": [models.Index(fields=["state", "kind"], name="jobs_by_state")],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("state__in", ("queued", "running"))),
                        fields=("kind", "model"),
                        name="a_model_has_one_live_job_of_a_kind",
                    )
                ],
            },
        ),
    ]
