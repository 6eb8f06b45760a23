"""The admin's forms of the catalog: they take texts as typed and hand the law plain JSON.

A form judges nothing but whether its lines can be read. What the law refuses comes back to it as `faults`,
and is shown at the field it is about.
"""

from catalog.forms.fields import LinesField, SpanField, why_field
from catalog.forms.keys import KeyEditForm, KeyForm
from catalog.forms.models import ModelForm, ProfileForm, ProfileFormSet

__all__ = [
    "KeyEditForm",
    "KeyForm",
    "LinesField",
    "ModelForm",
    "ProfileForm",
    "ProfileFormSet",
    "SpanField",
    "why_field",
]
