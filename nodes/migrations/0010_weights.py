import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    """What is in the nodes' stores, and how fast what is on its way comes."""

    dependencies = [
        ("nodes", "0009_attempts"),
    ]

    operations = [
        migrations.AddField(
            model_name="rank",
            name="bytes_per_s",
            field=models.PositiveBigIntegerField(help_text="of what it fetches", null=True),
        ),
        migrations.CreateModel(
            name="Weights",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("key", models.CharField(max_length=32)),
                ("repo", models.CharField(max_length=200)),
                ("revision", models.CharField(max_length=200)),
                (
                    "state",
                    models.CharField(
                        choices=[("held", "Held"), ("fetching", "Fetching"), ("partial", "Partial")],
                        max_length=10,
                    ),
                ),
                ("size_bytes", models.PositiveBigIntegerField(default=0)),
                ("total_bytes", models.PositiveBigIntegerField(null=True)),
                ("bytes_per_s", models.PositiveBigIntegerField(null=True)),
                ("is_used", models.BooleanField(default=False)),
                ("reason", models.TextField(blank=True)),
                (
                    "node",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="weights",
                        to="nodes.node",
                    ),
                ),
            ],
            options={
                "verbose_name": "weights",
                "verbose_name_plural": "weights",
                "ordering": ["repo", "revision", "node__name"],
                "default_permissions": ("view", "add", "delete"),
                "constraints": [
                    models.UniqueConstraint(fields=("node", "key"), name="weights_are_on_a_node_once")
                ],
            },
        ),
    ]
