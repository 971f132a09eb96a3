"""Formats of strings as regular expressions: each takes only what its RFC calls valid, and most of it.

    KNOWN["date"]      "^(?:…)$", as pattern.normalize writes it

All formats that draft 2020-12 names are here. What a format's own specification leaves to look-ups or to counting over the whole
(public suffixes, 253 characters of a host name, leap seconds) is cut to something narrower that a regular expression can say,
so a text that matches is valid for every checker. A text that does not may be valid all the same.
"""

from trunkline.grammar.regex import pattern

# RFC 3339. Years from 1000 on: Python's dates have no year 0. A second 60 is only right on some days: left out.
_YEAR = "[1-9][0-9]{3}"
_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"

# RFC 3339, appendix A: what is left out is left out at both ends, never in the middle.
_N = "[0-9]{1,9}"
_DURATION_TIME = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION_DATE = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_N}W)"

# RFC 1123. At most 63 characters a label and 253 in all: three labels of any length, or up to eleven of 20. No two hyphens
# together, which as third and fourth character say that the label is encoded (RFC 5891).
_LABEL = "(?:[a-z0-9]{1,63}|[a-z0-9]{1,15}(?:-[a-z0-9]{1,15}){1,3})"
_SHORT_LABEL = "(?:[a-z0-9]{1,20}|[a-z0-9]{1,6}(?:-[a-z0-9]{1,6}){1,2})"
_LOWER_HOST = f"(?:{_LABEL}(?:\\.{_LABEL}){{0,2}}|{_SHORT_LABEL}(?:\\.{_SHORT_LABEL}){{3,10}})"
_HOST = _LOWER_HOST.replace("a-z", "A-Za-z")

# RFC 5321: a dot-string of at most 64 characters, and a domain.
_ATOM = "A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-"
_OTHER_LETTERS = "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0386-\u0481\u0531-\u0556\u05d0-\u05ea\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"


def _local(atom: str, most: int, most_short: int) -> str:
    return f"(?:[{atom}]{{1,{most}}}|[{atom}]{{1,{most_short}}}(?:\\.[{atom}]{{1,{most_short}}}){{1,3}})"


_EMAIL = f"{_local(_ATOM, 64, 15)}@{_HOST}"
# 64 octets: at most 4 a character.
_IDN_EMAIL = f"(?:{_EMAIL}|{_local(_ATOM + _OTHER_LETTERS, 21, 4)}@{_LOWER_HOST})"

# RFC 2673, 4291 (the text forms; no zone).
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = (
    f"(?:(?:{_H16}:){{6}}{_LS32}"
    f"|::(?:{_H16}:){{5}}{_LS32}"
    f"|(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}"
    f"|(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}"
    f"|(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}"
    f"|(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}"
    f"|(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}"
    f"|(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}"
    f"|(?:(?:{_H16}:){{0,6}}{_H16})?::)"
)

_UUID = "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"

# RFC 3986, appendix A, and RFC 3987 with its ucschar.
_UCS = (
    "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
    + "\U000e1000-\U000efffd"
)


def _reference(others: str) -> tuple[str, str]:
    """URI and relative reference; `others` are characters that may stand beside the unreserved ones."""
    unreserved = f"A-Za-z0-9._~{others}\\-"
    sub = "!$&'()*+,;="
    escape = "%[0-9A-Fa-f]{2}"
    pchar = f"(?:[{unreserved}{sub}:@]|{escape})"
    no_colon = f"(?:[{unreserved}{sub}@]|{escape})"
    segments = f"(?:/{pchar}*)*"
    host = f"(?:\\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\\]|(?:[{unreserved}{sub}]|{escape})*)"
    authority = f"//(?:(?:[{unreserved}{sub}:]|{escape})*@)?{host}(?::[0-9]*)?{segments}"
    tail = f"(?:\\?(?:{pchar}|[/?])*)?(?:#(?:{pchar}|[/?])*)?"
    rooted = f"/(?:{pchar}+{segments})?"
    uri = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}|{rooted}|{pchar}+{segments}|){tail}"
    relative = f"(?:{authority}|{rooted}|{no_colon}+{segments}|){tail}"
    return uri, f"(?:{uri}|{relative})"


_URI, _URI_REFERENCE = _reference("")
_IRI, _IRI_REFERENCE = _reference(_UCS)

# RFC 6570, section 2.
_VARCHAR = "(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
_VARSPEC = f"{_VARCHAR}(?:\\.?{_VARCHAR})*(?::[1-9][0-9]{{0,3}}|\\*)?"
_URI_TEMPLATE = f"(?:[!#$&(-;=?-\\[\\]_a-z~{_UCS}]|%[0-9A-Fa-f]{{2}}|\\{{[+#./;?&]?{_VARSPEC}(?:,{_VARSPEC})*\\}})*"

# RFC 6901; draft-bhutton-relative-json-pointer-00 without its index manipulation.
_JSON_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_RELATIVE_JSON_POINTER = f"(?:0|[1-9][0-9]*)(?:#|{_JSON_POINTER})"

# A simple part of ECMA-262's expressions: characters, classes, \d and the like, groups one deep, quantifiers, alternatives.
_RE_CLASS = "\\[\\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,:;/@])+\\]"
_RE_ATOM = f"(?:[A-Za-z0-9_ ,:;/@=%&#<>\"'!~-]|\\.|\\\\[dDsSwW.*+?()\\[\\]{{}}|^$/\\\\]|{_RE_CLASS})"
_RE_QUANTIFIER = "(?:[*+?]|\\{[1-9][0-9]?\\})?"
_RE_SEQUENCE = f"(?:{_RE_ATOM}{_RE_QUANTIFIER})*"
_RE_GROUP = f"\\((?:\\?:)?{_RE_SEQUENCE}(?:\\|{_RE_SEQUENCE})*\\)"
_RE_DEEP = f"(?:(?:{_RE_ATOM}|{_RE_GROUP}){_RE_QUANTIFIER})*"
_REGEX = f"\\^?{_RE_DEEP}(?:\\|{_RE_DEEP})*\\$?"

_SOURCES = {
    "date-time": f"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _IDN_EMAIL,
    "hostname": _HOST,
    "idn-hostname": _LOWER_HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri": _IRI,
    "iri-reference": _IRI_REFERENCE,
    "uuid": _UUID,
    "uri-template": _URI_TEMPLATE,
    "json-pointer": _JSON_POINTER,
    "relative-json-pointer": _RELATIVE_JSON_POINTER,
    "regex": _REGEX,
}

KNOWN: dict[str, str] = {name: pattern.normalize(f"^(?:{source})$") for name, source in _SOURCES.items()}
