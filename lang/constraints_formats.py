"""The formats of JSON strings as regular expressions, and patterns in the words of llguidance.

JSON Schema takes its patterns from ECMAScript, llguidance its own from Rust; `pattern_of`
translates where they differ. The formats follow the standards that JSON Schema names: RFC 3339
(dates and times), 5321 (email), 1123 (hostname), 4291 (ipv6), 3986 (uri), 9562 (uuid).
Used by `constraints_schema.py` and `constraints_types.py`.
"""

from __future__ import annotations

_MOST_DIGITS = 4_300  # of an integer that Python reads
INTEGER = rf"(?:0|-?[1-9][0-9]{{0,{_MOST_DIGITS - 1}}})"
_EXPONENT = r"[eE](?:\+?(?:[0-9]{1,2}|[12][0-9]{2}|30[0-7])|-[0-9]{1,3})"
NUMBER = rf"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:{_EXPONENT})?"

# Every day of the calendar and no other: 30 February is not a date, 29 February only in leap years.
_DAYS = (
    r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # not 0000: Python has none
DATE = rf"(?:{_YEAR}-(?:{_DAYS})|{_LEAP_YEAR}-02-29)"
_HOUR = r"(?:[01][0-9]|2[0-3])"
_FRACTION = r"(?:\.[0-9]{1,9})?"
ZONE = rf"(?:[zZ]|[+-]{_HOUR}:[0-5][0-9])"


def _leap_seconds() -> str:
    """Second 60 is the last one of a day in UTC, so in other zones hour and minute follow from the
    zone. Those of quarters of an hour are here, which is all that clocks are set to.
    """
    times = [rf"23:59:60{_FRACTION}[zZ]"]
    for hour in range(24):
        east, west = (hour + 1) % 24, 23 - hour
        times.append(rf"{hour:02}:59:60{_FRACTION}(?:\+{east:02}:00|-{west:02}:00)")
        for zone in (15, 30, 45):
            times += [
                rf"{hour:02}:{zone - 1:02}:60{_FRACTION}\+{hour:02}:{zone:02}",
                rf"{hour:02}:{59 - zone:02}:60{_FRACTION}-{23 - hour:02}:{zone:02}",
            ]
    return "|".join(times)


_LOCAL = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9]{_FRACTION}"
TIME = rf"(?:{_HOUR}:[0-5][0-9]:[0-5][0-9]{_FRACTION}{ZONE}|{_leap_seconds()})"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """RFC 4291: eight groups, or fewer around one `::`; the last two may be an IPv4 address."""
    last = rf"(?:{_H16}:{_H16}|{_IPV4})"
    forms = [rf"(?:{_H16}:){{6}}{last}"]
    for before in range(8):  # groups before `::`, which stands for at least one
        head = rf"{_H16}(?::{_H16}){{{before - 1}}}" if before else ""
        room = 7 - before  # groups that fit behind
        if room >= 2:
            forms.append(rf"{head}::(?:{_H16}:){{0,{room - 2}}}{last}")
        forms.append(rf"{head}::(?:{_H16})?" if room else f"{head}::")
    return rf"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_PCHAR = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_USER = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2})*"
_HOST = (
    rf"(?:\[(?:{_IPV6}|v[0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+)\]"
    r"|(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})*)"
)
_SPAN = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_CLOCK = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-%s{_HEX}{{3}}-%s{_HEX}{{3}}-{_HEX}{{12}}"

FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": rf"{DATE}[tT]{TIME}",
    "time-local": _LOCAL,  # without a zone, as OpenAPI calls it
    "date-time-local": rf"{DATE}[tT]{_LOCAL}",
    "duration": rf"P(?:{_SPAN}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})"
    rf"@(?:{_LABEL}(?:\.{_LABEL})*|\[(?:{_IPV4}|IPv6:{_IPV6})\])",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?://(?:{_USER}@)?{_HOST}(?::[0-9]*)?(?:/{_PCHAR}*)*"
    rf"|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*|)"
    rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?",
    "uuid": _UUID % (_HEX, _HEX),
    **{f"uuid{version}": _UUID % (version, "[89abAB]") for version in range(1, 9)},
}

# What `\s` is in ECMAScript; Rust knows neither U+FEFF there nor leaves out U+0085.
_SPACE = r"\t\n\x0B\x0C\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
_SPACE += r"\u{FEFF}"


def pattern_of(pattern: str) -> str:
    """An ECMAScript pattern as llguidance reads it: `\\s` and `\\S` have ECMAScript's spaces."""
    out: list[str] = []
    escaped = False
    for character in pattern:
        if escaped:
            escaped = False
            if character in "sS":
                out[-1] = f"[{'^' if character == 'S' else ''}{_SPACE}]"
                continue
        elif character == "\\":
            escaped = True
        out.append(character)
    return "".join(out)
