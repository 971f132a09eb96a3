"""Where a JSON value ends, in a text that arrives bit by bit. Knows no call.

value = JsonValue()
value.advance('{"a": ', 0)      # 6: all of it belongs to the value
value.advance('"}"}, …', 0)     # 4: what follows does not, and `is_over`
"""

import re


class JsonValue:
    """Finds where a JSON value ends, in a text that arrives bit by bit. Looks at quotes and brackets only: whether it is
    valid is not asked.

    is_over  the end was found
    """

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._in_scalar = False

    def advance(self, text: str, at: int) -> int:
        """Read on from `at`; returns the index behind what belongs to the value."""
        while at < len(text):
            if self._in_string and not self._escaped:  # runs of ordinary characters at once
                if (special := _SPECIAL.search(text, at)) is None:
                    return len(text)
                at = special.start()
            if not self._takes(text[at]):
                self.is_over = True
                return at
            at += 1
            if self.is_over:
                return at
        return at

    def _takes(self, character: str) -> bool:
        """One character; False if it is no longer part of the value."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
            self.is_over = not self._in_string and self._depth == 0
        elif self._in_scalar and (character in "]},;" or character.isspace()):
            return False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_over = self._depth <= 0
            return self._depth >= 0
        elif self._depth == 0:
            self._in_scalar = True
        return True


_SPECIAL = re.compile(r'["\\]')  # within a string
