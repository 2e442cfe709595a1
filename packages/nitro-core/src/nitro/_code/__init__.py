"""Words about user code: functions, the values that they read, their source lines."""

from ._content import value_digest, why_not_by_content
from ._origin import library_name
from ._record import arrived_since, describes_code, moved_since, words_to_json
from ._source_lines import SourceLine, raised_at, user_lines
from ._values import IdentityMemo, describe
from ._words import Words, as_defined_now, moved_words, read_words

__all__ = [
    "IdentityMemo",
    "SourceLine",
    "Words",
    "arrived_since",
    "as_defined_now",
    "describe",
    "describes_code",
    "library_name",
    "moved_since",
    "moved_words",
    "raised_at",
    "read_words",
    "user_lines",
    "value_digest",
    "why_not_by_content",
    "words_to_json",
]
