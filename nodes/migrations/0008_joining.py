import django.db.models.deletion
import django.db.models.functions.datetime
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    """Machines join by a token, and show a certificate of their own."""

    dependencies = [
        ("catalog", "0007_scope_metrics"),
        ("nodes", "0007_usage"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name="node",
            name="certificate",
            field=models.CharField(
                blank=True,
                default="",
                help_text="SHA-256 of the one its agent shows; empty: any that the system's authorities vouch for",
                max_length=64,
            ),
            preserve_default=False,
        ),
        migrations.CreateModel(
            name="JoinToken",
            fields=[
                ("id", models.CharField(max_length=8, primary_key=True, serialize=False)),
                ("digest", models.CharField(max_length=64)),
                (
                    "node_name",
                    models.CharField(
                        blank=True, help_text="empty: as the machine calls itself", max_length=200
                    ),
                ),
                ("labels", models.JSONField(blank=True, default=dict)),
                ("by", models.CharField(max_length=150)),
                ("created_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("expires_at", models.DateTimeField()),
                ("revoked_at", models.DateTimeField(null=True)),
                ("used_at", models.DateTimeField(null=True)),
                ("claim", models.CharField(blank=True, max_length=64)),
                (
                    "key",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="catalog.key",
                    ),
                ),
                (
                    "maker",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "node",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="nodes.node",
                    ),
                ),
            ],
            options={"ordering": ["-created_at"], "default_permissions": ("view",)},
        ),
    ]
