from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("catalog", "0008_key_reach"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name="key",
            name="is_playground",
            field=models.BooleanField(default=False, help_text="its user's page for trying models has it"),
        ),
        migrations.AddConstraint(
            model_name="key",
            constraint=models.UniqueConstraint(
                condition=models.Q(("is_playground", True), ("revoked_at", None)),
                fields=("user",),
                name="a_user_has_one_playground_key",
            ),
        ),
    ]
