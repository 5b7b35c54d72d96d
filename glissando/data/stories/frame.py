"""The frame of every story: who, where, what mood, how talkative, which day; reactions; and how stories end.

The first sentence says nothing of the labels, so that it can serve as a prompt. The second decides the mood,
        the
third how much is said aloud: `+` has three quoted lines, `0` has one, `-` has none.
"""

from __future__ import annotations

RULES: dict[str, str] = {
    "who": "{size=sizes.a} {kind=kinds} [named|called] {hero=heroes}",
    "opening": """[
        5%Once upon a time, [there was <who> who [lived|slept|worked] {home=homes.at}.
            |<who> lived {home=homes.at}.]
        |3%Long ago, [<who> lived {home=homes.at}.|there was <who> {home=homes.at}.]
        |2%There was once <who>, whose home was {home=homes.at}.
        |2%This is the [story|tale] of {hero=heroes}, {size=sizes.a} {kind=kinds} who lived {home=homes.at}.
        |2%{^home=homes.at} [lived|there lived|slept] <who>.]""",
    "love": "{f} {d}",
    "temper": """[{^hero.he} was|All knew {hero.him} as|They called {hero.him}|Mostly {hero.he} was]
        {mood=tempers.a} {kind} with {=qual.a} {=wear} who [loved|lived on|adored|sold] {f=flavors}
        {d=dishes}.""",
    "voice": """[
        1%{!speech=+}"{=quips@mood}" [{hero.he}|{hero}] [would say|liked to say|often said|used to call].
        |1%{!speech=0}{^hero.he} {=sometimes} {=spoke}.
        |1%{!speech=-}{^hero.he} {=rarely} {=spoke}.]""",
    "day": "{^=onedays}, [while|when|as] {=weather@mood},",
    "pal": "{pal=pals}[ the {=traits} {=looks} {pk=palkinds}|, {=traits.a} {=looks} {pk=palkinds},]",
    "palthe": "{pal=pals} the {=traits} {=looks} {pk=palkinds}",
    "on": "[{hero}|Yet {hero}|At first {hero}|Soon {hero}] {=midway@mood}.",
    "react": """[speech? +="{=cries@mood}" [{hero}|{hero.he}] {=shouts@mood}.
        |0,-=[{hero}|At that {hero}|Then {hero}|So {hero}] {=acts@mood}.]""",
    "elder": "{elder} {=regard@mood}.",
    "friend": "{pal} {=regard@mood}.",
    "end": """[mood?
        +=[That [evening|night]|At sunset|Later], {hero} {=homeward+} [home|back] to {home} and {=feast+}
        <love>, and dreamed of {=dreams+}.
        |0=[By evening|Later|After that|Then], {hero} {=homeward0} [home|back] to {home} and {=feast0} <love>,
        and dreamed of {=dreams0}.
        |-=[That night|By dark|At last|Later], {hero} {=homeward-} [home|back] to {home} and {=feast-} <love>,
        and dreamed of {=dreams-}.]""",
}
