"""Patterns for the values of `format`. Each matches no more than the format allows; some match less.

Names that JSON schema does not define are annotations, as it says, and restrict nothing.
"""

from __future__ import annotations

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9_+-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_IPV6 = (
    rf"(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,6}}:{_GROUP}|(?:{_GROUP}:){{1,5}}(?::{_GROUP}){{2}}"
    rf"|::{_GROUP}(?::{_GROUP}){{0,6}}|(?:{_GROUP}:){{1,7}}:|::)"
)
_SEGMENT = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_QUERY = rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,5}})?(?:/{_SEGMENT}*)*|{_SEGMENT}+(?:/{_SEGMENT}*)*){_QUERY}"
_RELATIVE = rf"(?:/?(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{{2}})+(?:/{_SEGMENT}*)*)?{_QUERY}"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_CLOCK = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION = rf"P(?:(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "iri-reference": f"{_URI}|{_RELATIVE}",
    "uri-template": f"{_URI}|{_RELATIVE}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
}
REFUSED = frozenset({"regex"})
"""Defined by JSON schema, and not enforced."""
