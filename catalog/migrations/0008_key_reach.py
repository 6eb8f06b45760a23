from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("catalog", "0007_scope_metrics"),
    ]

    operations = [
        migrations.AddField(
            model_name="key",
            name="cache_scope",
            field=models.CharField(blank=True, max_length=200),
        ),
        migrations.AddField(
            model_name="key",
            name="concurrency",
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="key",
            name="opened",
            field=models.ManyToManyField(
                blank=True, help_text="or these alone", related_name="opened_by", to="catalog.model"
            ),
        ),
        migrations.AddField(
            model_name="key",
            name="opens_all",
            field=models.BooleanField(default=True, help_text="every model, those to come as well"),
        ),
        migrations.AddField(
            model_name="key",
            name="requests_per_minute",
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddField(
            model_name="key",
            name="tokens_per_minute",
            field=models.PositiveIntegerField(default=0),
        ),
    ]
