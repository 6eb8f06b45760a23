"""Settings, all of them, read from the environment.

Without any environment llmgw keeps itself in one folder (`var/` beside manage.py): SQLite, a broker made of
files, and secrets it makes on first use. DATABASE_URL and REDIS_URL choose PostgreSQL and Redis. A value that
cannot be read stops the start with one sentence: the variable, the value, and what it should look like.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import dj_database_url

from catalog.durations import MINUTE
from llmgw import environment as env
from nodes.protocol import ClusterKey

# --- the folder, and secrets made on first use ------------------------------

BASE_DIR = Path(__file__).resolve().parent.parent
LLMGW_VAR = Path(env.text("LLMGW_VAR", str(BASE_DIR / "var"))).resolve()


def _folder(*parts: str) -> Path:
    path = LLMGW_VAR.joinpath(*parts)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _kept_secret(name: str) -> bytes:
    """The secret in this file, made if there is none. Of two processes that start at once, one decides."""
    path = _folder() / name
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as draft:  # mode 0600
            draft.write(secrets.token_hex(32))
            draft.flush()
            os.fsync(draft.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(draft.name, path)
    return path.read_bytes()


def _parse_master(text: str) -> bytes:
    if len(text) < 32:
        raise ValueError
    return text.encode()


def _parse_cluster_keys(text: str) -> tuple[ClusterKey, ...]:
    pairs = [part.strip().partition(":") for part in text.split(",")]
    keys = tuple(ClusterKey(key_id, bytes.fromhex(secret)) for key_id, _, secret in pairs)
    if not all(key.id.isalnum() and len(key.secret) >= 32 for key in keys):
        raise ValueError
    return keys


_MASTER = env.secret(
    "LLMGW_SECRET", b"", _parse_master, "32 characters or more, as from `openssl rand -hex 32`"
)
_MASTER = _MASTER or _kept_secret("secret")


def _derived(purpose: str) -> bytes:
    return hmac.new(_MASTER, f"llmgw {purpose}".encode(), hashlib.sha256).digest()


SECRET_KEY = _derived("django").hex()
LLMGW_KEY_PEPPER = _derived("api keys")
LLMGW_WEBHOOK_KEY = _derived("webhooks")

# Nodes' and replicas' tokens derive from these. The first one mints, all verify: so a key is rotated.
LLMGW_CLUSTER_KEYS: tuple[ClusterKey, ...] = env.secret(
    "LLMGW_CLUSTER_KEYS",
    (ClusterKey("k1", _derived("cluster")),),
    _parse_cluster_keys,
    "a list of id:secret with commas between, each secret 64 hex digits or more",
)


# --- llmgw ------------------------------------------------------------------

# Where weights come from.
LLMGW_HUB_ENDPOINT = env.url(
    "LLMGW_HUB_ENDPOINT", env.url("HF_ENDPOINT", "https://huggingface.co", "https", "http"), "https", "http"
)
HF_TOKEN = env.text("HF_TOKEN", "")
LLMGW_HUB_TIMEOUT_S = env.seconds("LLMGW_HUB_TIMEOUT_S", 10)
LLMGW_HUB_CACHE_S = env.seconds("LLMGW_HUB_CACHE_S", 30)  # for so long a good answer may be given again
LLMGW_RECHECK_S = env.seconds("LLMGW_RECHECK_S", 6 * 3600)  # a check that is older is made again
# The second is what the hub's own client and the engines read.
LLMGW_OFFLINE = env.is_on("LLMGW_OFFLINE") or env.is_on("HF_HUB_OFFLINE")

# The reconciler: how often it looks, how long one pass may hold the lease, how long silence is believed.
LLMGW_TICK_S = env.seconds("LLMGW_TICK_S", 2)
LLMGW_LEASE_S = env.seconds("LLMGW_LEASE_S", 30)
LLMGW_AGENT_TIMEOUT_S = env.seconds("LLMGW_AGENT_TIMEOUT_S", 5)
LLMGW_SUSPECT_AFTER_S = env.seconds("LLMGW_SUSPECT_AFTER_S", 10)
LLMGW_LOST_AFTER_S = env.seconds("LLMGW_LOST_AFTER_S", 90)
LLMGW_KEEP_REPLICAS_S = env.seconds("LLMGW_KEEP_REPLICAS_S", 24 * 3600)  # shown for so long after they ended

# Notices: private networks that webhooks may be in (none is posted to otherwise), and how long one may take.
LLMGW_WEBHOOK_NETWORKS = env.networks("LLMGW_WEBHOOK_NETWORKS")
LLMGW_WEBHOOK_TIMEOUT_S = env.seconds("LLMGW_WEBHOOK_TIMEOUT_S", 5)

# Where Prometheus reads /metrics of gateways, as /api/sd tells it; without any, where it reads that itself.
LLMGW_GATEWAYS = env.urls("LLMGW_GATEWAYS", "https", "http")

# An on-demand model is unloaded after this long without a request, where its own idle_timeout is 0. In
# nanoseconds, as the catalog has its durations.
LLMGW_IDLE_TIMEOUT = env.duration_ns("LLMGW_IDLE_TIMEOUT", 15 * MINUTE)

# The gateway: how long a request may wait for its model to load, how long its client may read nothing of the
# answer, how big it may be, how old the table may be.
LLMGW_HOLD_S = env.seconds("LLMGW_HOLD_S", 60)
LLMGW_STALL_S = env.seconds("LLMGW_STALL_S", 30, at_most=300)  # after which a connection is cut off anyway
# How long an engine may take: to accept a connection, to begin its answer (a plain one is whole then, and so
# this is as long as OpenAI's clients wait), to go on with it (no engine computes one token for so long).
LLMGW_CONNECT_S = env.seconds("LLMGW_CONNECT_S", 3)
LLMGW_FIRST_BYTE_S = env.seconds("LLMGW_FIRST_BYTE_S", 600)
LLMGW_IDLE_S = env.seconds("LLMGW_IDLE_S", 300)
# A stream whose model is loading stays without a status for so long, so that an early failure has its own;
# and one that has nothing to say says so this often, since proxies give up on silence.
LLMGW_GRACE_S = env.seconds("LLMGW_GRACE_S", 2)
LLMGW_COMMENT_S = env.seconds("LLMGW_COMMENT_S", 10)
LLMGW_MAX_BODY_BYTES = env.size_bytes("LLMGW_MAX_BODY_BYTES", 16 * 1024 * 1024)
LLMGW_BODY_S = env.seconds("LLMGW_BODY_S", 120)  # for so long a body may take to arrive
LLMGW_MAX_HELD_BYTES = env.size_bytes(
    "LLMGW_MAX_HELD_BYTES", 512 * 1024 * 1024
)  # of all requests in one process
# Hosts from which engines may fetch the images, sounds and videos that a request names by URL.
LLMGW_MEDIA_HOSTS = env.names("LLMGW_MEDIA_HOSTS", [])
LLMGW_TABLE_POLL_S = env.seconds("LLMGW_TABLE_POLL_S", 0.25)
LLMGW_USAGE_FLUSH_S = env.seconds("LLMGW_USAGE_FLUSH_S", 5)  # so much usage a crash may lose

# A line of JSON for each request of /v1/: to stdout (-), to a file, or to nobody (off).
LLMGW_ACCESS_LOG = env.text("LLMGW_ACCESS_LOG", "-")

# Where a bench through the gateway asks: the address that clients have, as a worker reaches it.
LLMGW_GATEWAY_URL = env.url("LLMGW_GATEWAY_URL", "", "http", "https")

# Web processes: how many `manage.py web` and `manage.py gateway` start; how long one that stops goes on
# taking requests, so that whoever sends them notices, and how long it may finish those that it has begun.
LLMGW_WEB_WORKERS = env.count("LLMGW_WEB_WORKERS", 1)
LLMGW_LINGER_S = env.seconds("LLMGW_LINGER_S", 2)
LLMGW_DRAIN_S = env.seconds("LLMGW_DRAIN_S", 30)


# --- Django -----------------------------------------------------------------

DEBUG = env.is_on("LLMGW_DEBUG")
ALLOWED_HOSTS = env.names("LLMGW_ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "llmgw.apps.AdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "servestatic",
    "axes",
    "csp",
    "catalog",
    "nodes",
    "llmgw",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "servestatic.middleware.ServeStaticMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "axes.middleware.AxesMiddleware",  # last: it answers for a login that was locked out
]

ROOT_URLCONF = "llmgw.urls"
ASGI_APPLICATION = "llmgw.asgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

# A form of a model has 18 fields a profile: enough for a thousand of them. Django's default ends at 58. What
# all fields may hold together stays bounded by its DATA_UPLOAD_MAX_MEMORY_SIZE.
DATA_UPLOAD_MAX_NUMBER_FIELDS = 20_000

LANGUAGE_CODE = "en"
USE_I18N = False
USE_TZ = True
FORMAT_MODULE_PATH = "llmgw.formats"
TIME_ZONE = "UTC"

STATIC_URL = "/static/"
SERVESTATIC_USE_FINDERS = True  # served from where they are: there is no collectstatic step to forget
SERVESTATIC_ALLOW_ALL_ORIGINS = False

# Everything this program logs goes to stderr, for whoever started it to keep.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{levelname} {name}: {message}", "style": "{"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {
        "django": {"handlers": [], "level": "INFO", "propagate": True},
        # Anybody may send a strange host, and the answer tells of LLMGW_ALLOWED_HOSTS: no traceback for each.
        "django.security.DisallowedHost": {"level": "CRITICAL"},
        "axes": {"level": "WARNING"},  # who logged in is an operator's everyday
        "httpx2": {"level": "WARNING"},  # it tells each address, and the password that a mirror's may hold
    },
}


# --- the database -----------------------------------------------------------

# Immediate transactions: a transaction that reads and later writes fails at once in the deferred mode when
# another writer came between, whatever the time-out. WAL: readers never wait for the writer.
_SQLITE_OPTIONS = {
    "timeout": 20,
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}

# A server that vanished is noticed within seconds; TCP alone waits for a quarter of an hour, and the routing
# table with it. What the URL says wins.
_POSTGRESQL_OPTIONS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,  # milliseconds
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}


def _database() -> dict[str, Any]:
    url = env.url("DATABASE_URL", "", "postgres", "postgresql", "sqlite")
    database: dict[str, Any] = dict(dj_database_url.parse(url or f"sqlite:///{_folder() / 'db.sqlite3'}"))
    if database["ENGINE"] == "django.db.backends.sqlite3":
        database["OPTIONS"] = _SQLITE_OPTIONS
    else:
        database["OPTIONS"] = {**_POSTGRESQL_OPTIONS, **database.get("OPTIONS", {})}
    return database


DATABASES = {"default": _database()}


# --- Celery -----------------------------------------------------------------

REDIS_URL = env.url("REDIS_URL", "", "redis", "rediss")

if REDIS_URL:
    # A worker that was killed gives its tick back within seconds, not after Celery's default hour.
    CELERY_BROKER_URL = REDIS_URL
    CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, object] = {
        "visibility_timeout": 5,
        "unacked_restore_interval": 2,
        "unacked_restore_throttle": 1,
        "socket_connect_timeout": 2,
        "socket_timeout": 10,
    }
else:
    CELERY_BROKER_URL = "filesystem://localhost/"
    CELERY_BROKER_TRANSPORT = "llmgw.celery:FileTransport"
    CELERY_BROKER_TRANSPORT_OPTIONS = {"folder": str(_folder("broker")), "polling_interval": 0.1}

CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_RESULT_SERIALIZER = "json"
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_PUBLISH_RETRY = False  # whoever publishes is told at once; the next tick comes anyway
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # a broker that is away comes back; the worker waits for it
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULER = "llmgw.celery:SteadyScheduler"  # in memory: a tick needs no record
LLMGW_RECHECK_EVERY_S = min(60.0, LLMGW_RECHECK_S)  # each time a few models, the oldest checks first
LLMGW_FORGET_EVERY_S = 60.0  # what is too old is removed, some thousands of rows each time
LLMGW_SWEEP_EVERY_S = 10.0  # jobs whose worker died are found, and those that wait are offered again
LLMGW_NOTICE_EVERY_S = 5.0  # what is wrong is looked for, and told
CELERY_TASK_QUEUES: dict[str, dict[str, object]] = {"celery": {}, "jobs": {}}  # every worker asks both
CELERY_TASK_ROUTES = {"nodes.tasks.run_job": {"queue": "jobs"}}
CELERY_BEAT_SCHEDULE = {
    "tick": {"task": "nodes.tasks.tick", "schedule": LLMGW_TICK_S, "options": {"expires": LLMGW_TICK_S}},
    "recheck": {
        "task": "catalog.tasks.recheck",
        "schedule": LLMGW_RECHECK_EVERY_S,
        "options": {"expires": LLMGW_RECHECK_EVERY_S},
    },
    "forget usage": {
        "task": "nodes.tasks.forget_usage",
        "schedule": LLMGW_FORGET_EVERY_S,
        "options": {"expires": LLMGW_FORGET_EVERY_S},
    },
    "notice": {
        "task": "nodes.tasks.notice",
        "schedule": LLMGW_NOTICE_EVERY_S,
        "options": {"expires": LLMGW_NOTICE_EVERY_S},
    },
    "forget notices": {
        "task": "nodes.tasks.forget_notices",
        "schedule": LLMGW_FORGET_EVERY_S,
        "options": {"expires": LLMGW_FORGET_EVERY_S},
    },
    "sweep jobs": {
        "task": "nodes.tasks.sweep_jobs",
        "schedule": LLMGW_SWEEP_EVERY_S,
        "options": {"expires": LLMGW_SWEEP_EVERY_S},
    },
}


# --- who gets in ------------------------------------------------------------

AUTHENTICATION_BACKENDS = ["axes.backends.AxesStandaloneBackend", "django.contrib.auth.backends.ModelBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]

# Ten wrong passwords for one name from one address close that pair for five minutes.
AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = 5 / 60  # hours
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_COOLOFF_MESSAGE = "Too many wrong passwords for this name: wait for five minutes, then try again."
AXES_RESET_ON_SUCCESS = True
AXES_DISABLE_ACCESS_LOG = True
AXES_ENABLE_ADMIN = False
AXES_VERBOSE = False

REST_FRAMEWORK = {
    # The first one words the 401, so that a script without a key is told to bring one.
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "catalog.rest.KeyAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": [
        "rest_framework.permissions.IsAuthenticated",
        "rest_framework.permissions.IsAdminUser",
    ],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["catalog.rest.BoundedJSONParser"],
    "URL_FORMAT_OVERRIDE": None,
    "EXCEPTION_HANDLER": "catalog.rest.answer_error",
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "rest_framework.negotiation.DefaultContentNegotiation",
    "DEFAULT_METADATA_CLASS": None,  # /api/schema/ tells it all
    "DEFAULT_SCHEMA_CLASS": "catalog.schema.generator.Schema",
}

SPECTACULAR_SETTINGS = {
    "TITLE": "llmgw",
    "DESCRIPTION": "What the admin does, for programs. Inference is not here: /v1/ speaks OpenAI's protocol.",
    "VERSION": "1",
    "SCHEMA_PATH_PREFIX": "/api",
    "SCHEMA_COERCE_PATH_PK_SUFFIX": False,
    "COMPONENT_SPLIT_REQUEST": True,
    "COMPONENT_SPLIT_PATCH": False,  # a patch has a form of its own
    "PREPROCESSING_HOOKS": ["catalog.schema.generator.addresses"],
    "POSTPROCESSING_HOOKS": ["catalog.schema.generator.close"],  # and choices stay where they are used
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,  # and explain themselves
}


# --- the wire ---------------------------------------------------------------

# Plain HTTP is for loopback (`make up` asks for it). Otherwise TLS ends in front of this program, and the
# proxy says so with X-Forwarded-Proto, which uvicorn believes from the addresses in FORWARDED_ALLOW_IPS.
LLMGW_PLAIN_HTTP = env.is_on("LLMGW_PLAIN_HTTP")

SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = not LLMGW_PLAIN_HTTP
SECURE_HSTS_SECONDS = 0 if LLMGW_PLAIN_HTTP else 30 * 24 * 3600
SESSION_COOKIE_AGE = 12 * 3600
CSRF_COOKIE_HTTPONLY = True
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
}

# What the names under this host and browsers' preload lists should do is for the host's owner to say.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]
