from django.db import migrations, models
from django.db.models.functions import Now


def revoke_what_would_open_all(apps, schema_editor):
    keys = apps.get_model("catalog", "Key").objects.filter(opens_all=False, revoked_at=None)
    keys.update(revoked_at=Now())


class Migration(migrations.Migration):
    """On the way back a key for some models is revoked: the code of before would let it open every one."""

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
        migrations.RunPython(migrations.RunPython.noop, revoke_what_would_open_all),
    ]
