
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('catalog', '0001_first'),
        ('nodes', '0001_first'),
    ]

    operations = [
        migrations.CreateModel(
            name='Held',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('wanted', models.CharField(choices=[('run', 'Run'), ('drain', 'Drain'), ('stop', 'Stop')], max_length=10)),
                ('why', models.TextField()),
                ('since', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'verbose_name_plural': 'held',
            },
        ),
        migrations.CreateModel(
            name='Load',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('level', models.CharField(choices=[('pressed', 'Pressed'), ('slack', 'Slack')], max_length=10)),
                ('since', models.DateTimeField()),
                ('replicas', models.PositiveIntegerField()),
            ],
            options={
                'verbose_name_plural': 'load',
            },
        ),
        migrations.CreateModel(
            name='Roll',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('by', models.CharField(max_length=150)),
                ('why', models.TextField(blank=True)),
                ('asked_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('keep', models.PositiveIntegerField(default=0)),
                ('halted', models.TextField(blank=True)),
            ],
        ),
        migrations.AddField(
            model_name='cluster',
            name='alarm',
            field=models.TextField(blank=True, editable=False),
        ),
        migrations.AddField(
            model_name='cluster',
            name='is_paused',
            field=models.BooleanField(default=False),
        ),
        migrations.AddField(
            model_name='cluster',
            name='paused_by',
            field=models.CharField(blank=True, max_length=150),
        ),
        migrations.AddField(
            model_name='cluster',
            name='paused_why',
            field=models.TextField(blank=True),
        ),
        migrations.AddField(
            model_name='node',
            name='is_draining',
            field=models.BooleanField(default=False, help_text='what runs here moves elsewhere'),
        ),
        migrations.AddField(
            model_name='replica',
            name='replaces',
            field=models.UUIDField(help_text='the replica that leaves once this one is ready', null=True),
        ),
        migrations.AddConstraint(
            model_name='node',
            constraint=models.CheckConstraint(condition=models.Q(('is_draining', False), ('is_cordoned', True), _connector='OR'), name='a_draining_node_is_cordoned'),
        ),
        migrations.AddField(
            model_name='held',
            name='replica',
            field=models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='held', to='nodes.replica'),
        ),
        migrations.AddField(
            model_name='load',
            name='model',
            field=models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='load', to='catalog.model'),
        ),
        migrations.AddField(
            model_name='roll',
            name='model',
            field=models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='roll', to='catalog.model'),
        ),
    ]
