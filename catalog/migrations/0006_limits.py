from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("catalog", "0005_source_asked"),
    ]

    operations = [
        migrations.AddField(
            model_name="model",
            name="concurrency",
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="model",
            name="over_max_output",
            field=models.CharField(blank=True, max_length=10),
        ),
        migrations.AddField(
            model_name="model",
            name="requests_per_minute",
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="model",
            name="timeout_connect_ns",
            field=models.PositiveBigIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="model",
            name="timeout_first_byte_ns",
            field=models.PositiveBigIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="model",
            name="timeout_hold_ns",
            field=models.PositiveBigIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="model",
            name="timeout_idle_ns",
            field=models.PositiveBigIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="model",
            name="tokens_per_minute",
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddConstraint(
            model_name="model",
            constraint=models.CheckConstraint(
                condition=models.Q(("over_max_output__in", ("", "clamp", "refuse"))),
                name="over_max_output_is_known",
            ),
        ),
        migrations.AddConstraint(
            model_name="model",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("timeout_connect_ns__lte", 86400000000000),
                    ("timeout_first_byte_ns__lte", 86400000000000),
                    ("timeout_hold_ns__lte", 86400000000000),
                    ("timeout_idle_ns__lte", 86400000000000),
                ),
                name="no_timeout_is_longer_than_a_day",
            ),
        ),
    ]
