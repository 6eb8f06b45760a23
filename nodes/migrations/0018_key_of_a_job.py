import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("catalog", "0009_playground_key"),
        ("nodes", "0017_trouble_is_told_and_not_viewed"),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="key",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to="catalog.key",
            ),
        ),
    ]
