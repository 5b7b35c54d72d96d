"""Plots about things: lost, hidden, traded, borrowed, shared, counted, baked, given, wished for, broken.

Each tells a beginning, calls `<on>` for a mood in the middle, has one spot where someone speaks unless `speech`
is `-`, and turns on `mood`; facts of the beginning are needed again at the end.
"""

from __future__ import annotations

PLOTS: dict[str, str] = {
    "lost": """{hero} lost {hero.his} {=qual} {c=colors} {t=toys}, a gift from {elder=elders}. {^hero.he}
        {=slowly} {=searched}
        {p=places_a.in} and {q=places_b.in}, but found {=junk.a}. <on>
        [speech? +,0="Have you seen [it|my {t}]?" {hero.he} {=slowly} asked <palthe>.|-={^hero.he} {=slowly}
        asked <palthe>.]
        They {=searched} again [{p.in}|{q.in}]. [mood?
        +=There was the {c} {t}, {=covers}! <react> <elder>
        |0=There was the {c} {t}, {=covers}, but [scratched|dented|faded]. <react> <elder>
        |-=There was the {c} {t}, {=covers}, [broken|crushed|torn|burnt]. <react> <elder>]""",
    "hidden": """{hero} met <palthe>. For {=qual.a} [game|puzzle|riddle], {pal.he}
        {=slowly} [hid|put] {=qual.a} {t=treasures} in {=qual.a}
        {a=colors} {b=baskets}, then moved it to {=qual.a} {n=shades} [one.{here:=n}|one, and then {=qual.a}
        {e=hues} one.{here:=e}|one, and back again.{here:=a}] <on>
        [speech? +,0="[Where is it|Which one is it|Can you guess]?" asked {pal} {=slowly}.
        |-={hero} {=slowly} [chose|guessed|looked].] [mood?
        +=At once {hero.he} {=slowly} found the {t} in the {here} {b}. <react> <friend>
        |0=After {=spans} {hero.he} {=slowly} found the {t} in the {here} {b}. <react> <friend>
        |-={hero} {=slowly} erred, for the {t} was in the {here} {b}. <react> <friend>]""",
    "trade": """{hero} {=went} out to trade {=qual.a} {a=crafts}. {^p=places_a.in} <pal> [had|showed
        {hero.him}] {=qual.a}
        {b=treasures}. [speech? +,0="[Shall we swap|Will you trade|Is it a deal]?" asked {pal} {=slowly}.
        |-={pal} {=slowly} [eyed|praised] the {a}.] So they swapped. <on> {^q=places_b.in}, {elder=elders}
        {=slowly} gave
        {=qual.a} {g=tools} for the {b}. <react> Now {pal} had the {a}, {elder} the {b}, and {hero} the
        {g}[mood?
        +=, [worth both|best of all].|0=, [fair|good] enough.|-=, [broken|worthless|full of worms].]""",
    "borrow": """{hero} borrowed {=qual.a} {c=colors} {g=tools} from {elder=elders} to mend {=qual.a}
        {r=repairs} for
        <palthe>. [speech? +,0="[Return it|I need it|Be back] by {k=times}," said {elder} {=slowly}.
        |-=It was [due|wanted] by {k=times}.] {^hero.he} {=slowly} {=worked} for {=spans}. <on> [mood?
        +=The {r} looked [new|splendid], and {pal} gave {hero.him} {=snacks}. <react> By {k} the {c} {g} was
        back, and <elder>
        |0=The {r} held, and {pal} paid in {=snacks}. <react> After {k} the {c} {g} was back, and <elder>
        |-=The {r} [fell down|broke], and {pal} threw {=snacks}. <react> By {k} the {c} {g} was [gone|lost],
        and <elder>]""",
    "sharing": """{hero} carried {n=many} {=qual} {s=snacks} in {=qual.a} {c=colors} {b=baskets}.
        {^=places_a.in} {hero.he} {=slowly} {=went}
        past <palthe>, [unfed|starving] since {=nights}. <on>
        [speech? +,0="[May I have some|Can you spare a bite|I am so hungry]," said {pal} {=slowly}.
        |-={pal} {=slowly} [looked at|smelled|eyed] the {b}.] [mood?
        +={hero} {=slowly} gave {pal.him} {m=few}.{rest#n-m} <react> {^rest} of the {n} {s} were left in the
        {c} {b}, and <friend>
        |0={hero} {=slowly} sold {pal.him} {m=few}.{rest#n-m} <react> {^rest} of the {n} {s} were left in the
        {c} {b}, and <friend>
        |-={hero} {=slowly} ran and dropped {m=few}.{rest#n-m} <react> {^rest} of the {n} {s} were left in the
        {c} {b}, and <friend>]""",
    "counting": """{hero} was to count the {=qual} {s=creatures} of {elder=elders}. {^hero.he} {=slowly} saw
        {n=many} {p=places_a.in} and
        {m=few} {q=places_b.in}.{sum#n+m} <on> Then {hero.he} {=went} past <palthe> with
        {=junk.a}. [speech? +,0="[Well|So|Tell me], how many {s}?" asked {elder} {=slowly}.
        |-={elder} {=slowly} [waited|came].] [mood?
        +={hero} {=slowly} [counted|added] and said {sum}. <react> {^elder} gave {hero.him} {=qual.a} {=prizes}.
        |0={hero} {=slowly} added twice and said {sum}. <react> <elder>
        |-={hero} forgot those {p.in} and said {m}, not {sum}. <react> <elder>]""",
    "baking": """{hero} baked {=qual.a} {k=cakes} for {elder=elders}, with {=qual} {a=drys}, {b=wets} and
        {=qual} {s=sweets}. {^hero.he} bought
        the {a} {p=places_a.in}, and <pal> {=slowly} [lent|gave] {hero.him} the {b}. <on>
        [speech? +,0="[Mind|Now add|Go easy on] the {s}," said {pal} {=slowly}.
        |-=The {s} {=slowly} went in last.] They {=slowly} waited {=spans}. [mood?
        +=It was [golden|perfect|heavenly]. <react> {^elder} tasted the {a}, the {b} and the {s}, and
        {=regard@mood}.
        |0=It was [small|crooked|so so]. <react> {^elder} wanted [more|less] [{a}|{b}|{s}], and {=regard@mood}.
        |-=It was [burnt|raw|awful], for they had left out the [{a}|{b}|{s}]. <react> <elder>]""",
    "gift": """{hero} needed a gift for <pal> who collected {=qual} {c=colors} things. So {hero.he} {=slowly}
        made
        {=qual.a} {g=crafts} of {=qual} {m=scraps} found {p=places_a.in}, and {=worked} for {=spans}. <on>
        [speech? +,0="[Is this for me|What is it|You made this]?" asked {pal} {=slowly}.
        |-={pal} {=slowly} opened it.] [mood?
        +=It was the [finest|loveliest] {c} {g} ever. <react> Nobody saw that it was {m}, and <friend>
        |0=It was a [plain|useful] {c} {g}. <react> Some of the {m} showed, and <friend>
        |-=The {g} was not {c}, and it [broke|fell apart]. <react> Only {m} [was left|remained], and
        <friend>]""",
    "wish": """{hero} [got|won] a wish from {=qual.a} {w=wishers}, to be used by {k=times}.
        <pal> [said|thought] {=qual.a} {a=wonders}, but {hero} dreamed of {=qual.a} {b=prizes}. <on>
        [speech? +,0="[Choose well|Take your time|Be wise]," said {pal} {=slowly}.
        |-={^hero.he} {=slowly} thought for {=spans}.] [mood?
        +=Before {k}, {hero} {=slowly} wished for the {a}, for {pal}. <react> The {w} gave {hero.him} the {b}
        too.
        |0=Before {k}, {hero} {=slowly} gave the wish back. <react> The {w} kept the {a} and the {b}, and
        <friend>
        |-=But {hero} {=slowly} [slept|waited], and {k} went by. <react> The {w} took the {a} and the {b}
        away.]""",
    "lie": """{hero} [dropped|cracked|broke] the {=qual} {c=colors} {v=breakables} of {elder=elders}.
        [speech? +,0="It was {pal=pals}," {hero.he} {=slowly} lied.|-={^hero.he} {=slowly} blamed {pal=pals}.]
        So {pal}, {=traits.a} {pk=palkinds}, had to {=slowly} [sweep|scrub] {p=places_a.in} for {k=spans}. <on>
        But {=qual.a} bit of
        the {v} hung in {hero.his} {=qual} {y=clothes}. [mood?
        +={hero} {=went} to {elder} and {=slowly} told the truth. <react> {^pal} forgave {hero.him}, and they
        glued the {c} {v}.
        |0={elder} {=slowly} saw the {y}. <react> {hero} took {pal}'s place for {k} and paid for the {c} {v}.
        |-={elder} {=slowly} saw the {y}. <react> For {k} {pal} would not speak to {hero}, and the {c} {v} was
        lost.]""",
}
