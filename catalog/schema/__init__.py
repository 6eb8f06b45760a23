"""What /api/ takes and answers with, as OpenAPI tells it to those who generate clients.

Serializers describe here and judge nothing: a body is judged by the law (`catalog/spec.py`), whose limits are
repeated by name. A test holds the fields and the limits of both against each other.
"""

from catalog.schema.beside import MODEL_NAME, WHY
from catalog.schema.events import describe_events
from catalog.schema.keys import describe_keys
from catalog.schema.models import describe_check, describe_models, describe_profile, describe_roll

__all__ = [
    "MODEL_NAME",
    "WHY",
    "describe_check",
    "describe_events",
    "describe_keys",
    "describe_models",
    "describe_profile",
    "describe_roll",
]
