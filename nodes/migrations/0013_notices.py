import django.db.models.deletion
import django.db.models.functions.datetime
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):
    """What is wrong now and who is told of it; and how long passes take."""

    dependencies = [
        ("nodes", "0012_samples"),
    ]

    operations = [
        migrations.AddField(
            model_name="lease",
            name="last_s",
            field=models.FloatField(null=True),
        ),
        migrations.AddField(
            model_name="lease",
            name="passes",
            field=models.BigIntegerField(db_default=0),
        ),
        migrations.AddField(
            model_name="lease",
            name="passes_s",
            field=models.FloatField(db_default=0.0),
        ),
        migrations.CreateModel(
            name="Trouble",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("kind", models.CharField(max_length=40)),
                ("subject", models.CharField(max_length=300)),
                ("sentence", models.TextField()),
                ("since", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("told_at", models.DateTimeField(null=True)),
                ("gone_at", models.DateTimeField(null=True)),
            ],
            options={
                "default_permissions": ("view",),
                "constraints": [
                    models.UniqueConstraint(fields=("kind", "subject"), name="a_trouble_is_known_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="Webhook",
            fields=[
                (
                    "id",
                    models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False),
                ),
                ("name", models.CharField(max_length=200, unique=True)),
                ("url", models.CharField(max_length=2000)),
                (
                    "kinds",
                    models.JSONField(
                        default=list, help_text="the troubles that it is told of; empty: of all"
                    ),
                ),
                ("is_paused", models.BooleanField(default=False)),
                ("by", models.CharField(max_length=150)),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("delivered", models.BigIntegerField(default=0)),
                ("failed", models.BigIntegerField(default=0, help_text="tries")),
                ("given_up", models.BigIntegerField(default=0)),
                (
                    "streak",
                    models.PositiveIntegerField(default=0, help_text="tries that failed since one was taken"),
                ),
                ("claimed_until", models.DateTimeField(null=True)),
            ],
            options={
                "ordering": ["name"],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("name", ""), _negated=True), name="a_webhook_has_a_name"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Delivery",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("body", models.JSONField()),
                ("made_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("waiting", "Waiting"),
                            ("delivered", "Delivered"),
                            ("given up", "Given Up"),
                        ],
                        default="waiting",
                        max_length=10,
                    ),
                ),
                ("tries", models.PositiveIntegerField(default=0)),
                (
                    "next_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(),
                        help_text="not tried before then",
                    ),
                ),
                ("ended_at", models.DateTimeField(null=True)),
                ("status", models.PositiveIntegerField(help_text="of the last answer", null=True)),
                ("problem", models.TextField(blank=True)),
                (
                    "webhook",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="deliveries",
                        to="nodes.webhook",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "deliveries",
                "ordering": ["-id"],
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["state", "webhook", "next_at"], name="deliveries_that_are_due")
                ],
            },
        ),
    ]
