from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('catalog', '0004_permissions'),
    ]

    operations = [
        migrations.AddField(
            model_name='model',
            name='source_asked_at',
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AlterField(
            model_name='model',
            name='source_checked_at',
            field=models.DateTimeField(blank=True, help_text='when it was last answered', null=True),
        ),
        migrations.AlterField(
            model_name='model',
            name='source_state',
            field=models.CharField(blank=True, choices=[('', 'not checked'), ('ok', 'found'), ('warn', 'found, with a warning'), ('refuse', 'refused')], default='', max_length=10),
        ),
    ]
