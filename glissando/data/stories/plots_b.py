"""Plots about deeds: promises, quarrels, skills, patients, journeys, races, storms, secrets, contests,
monsters."""

from __future__ import annotations

PLOTS: dict[str, str] = {
    "promise": """{hero} promised to bring {=qual.a} {t=treasures} to <palthe> by {k=times}. {pal} would wait
        {p=places_a.in}. [speech? +,0="[I will be there|Count on me|I swear it]," {hero.he} {=slowly} said.
        |-=They {=slowly} [shook paws|nodded].] {^hero.he} [found|got] the {t} {q=places_b.in}, but
        {elder=elders} {=slowly} [chatted|napped|made
        tea]. <on> [mood?
        +=Then {hero} {=slowly} {=went} off and reached {pal} before {k}. <react> {^pal} took the {t} and
        {=regard+}.
        |0=It was just past {k}, and {pal} {=slowly} got up {p.in}. <react> {^pal} took the {t} and {=regard0}.
        |-=It was long past {k}, and {pal} {=slowly} [froze|sulked] {p.in} without the {t}. <react>
        <friend>]""",
    "quarrel": """{hero} [fought|argued] {=slowly} with <pal> over {=qual.a} {c=colors} {t=toys}. [speech?
        +,0="[It is mine|Let
        go|I had it first]!" yelled {pal}.|-=Both {=slowly} pulled.] {hero} {=went} off to sulk
        {p=places_a.in}, and {pal} hid
        {q=places_b.in}. <on> {^elder=elders} [came by|asked why|saw it]. [mood?
        +={hero} {=slowly} said sorry {q.in}. <react> They {=slowly} shared the {c} {t}, and <friend>
        |0={pal} {=slowly} came to talk {p.in}. <react> They {=slowly} gave the {c} {t} to {elder}, and <friend>
        |-={hero} stayed {p.in}, {pal} {q.in}. <react> The {c} {t} was {=slowly} [stolen|ruined], and
        <elder>]""",
    "skill": """{hero} [wanted|longed|hoped] to {s=skills} like {elder=elders}. {^p=places_a.in}
        {hero.he} {=slowly} practiced with {=qual.a} {c=colors} {g=cloths} and failed {n=few} times. <on>
        <pal> {=slowly} watched. [speech? +,0="[Try again|Nobody is born {s.a}|Keep at it]," said {elder}
        {=slowly}.
        |-={elder} {=slowly} [showed|taught] {hero.him} again.] So {hero} {=worked} on. [mood?
        +=Soon {hero} was the better {s.er}! <react> {^elder} {=slowly} waved the {c} {g}, and <friend>
        |0=Soon {hero} was a fair {s.er}. <react> {^hero.he} {=slowly} kept the {c} {g}, and <elder>
        |-=But {hero} was no {s.er} at all. <react> {^hero.he} {=slowly} tore up the {c} {g}, and <elder>]""",
    "patient": """{hero} found {=traits.a} {a=patients} {p=places_a.in} with
        a [broken|hurt|swollen] {b=bodyparts}. {^hero.he} {=slowly} wrapped
        the {b} in {=qual.a} {c=colors} {g=cloths} and fed it {=qual} {s=snacks} for {=spans}. <on> [speech?
        +,0="[Will it live|Does it
        hurt|May I help]?" {=slowly} asked <palthe>.|-=<pal> {=slowly} [helped|watched].] [mood?
        +=Soon the {a} was well. <react> It {=slowly} took off the {c} {g} and brought {=qual.a} {t=treasures}
        for the {s}.
        |0=The {b} stayed [stiff|crooked|weak]. <react> The {a} kept the {c} {g} and ate more {s}, and <friend>
        |-=But the {a} died after {=spans}. <react> The {c} {g} and the {s} were still there, and <friend>]""",
    "journey": """{hero} was sent by {elder=elders} to fetch {=qual.a} {t=treasures} from <palthe>. The way led
        past {p=places_a} and
        {q=places_b}. [speech? +,0="[Come in|Who is there|You look tired]," said {pal} {=slowly}.
        |-={pal} {=slowly} [opened|came out].] {hero} got the {t}. <on> Then {hero.he} {=slowly} {=went} back
        past {q} and {p}. [mood?
        +=The {t} was [safe|unharmed]. <react> {^elder} took the {t} and {=regard+}.
        |0=The {t} was [dusty|scuffed]. <react> {^elder} took the {t} and {=regard0}.
        |-=The {t} fell down [{p.in}|{q.in}]. <react> <elder>]""",
    "race": """{hero} raced <palthe> from {p=places_a} to {q=places_b}. {elder=elders} {=slowly} [offered|held
        up] {=qual.a} {c=colors}
        {z=prizes} for the winner. [speech? +,0="[Ready, steady, go|On your marks|Off you go]!" called {elder}
        {=slowly}.
        |-={elder} {=slowly} [rang a bell|waved].] {^pal} tripped on {=junk.a}.
        <on> [mood?
        +=At {q} {hero} was first by {n=few} steps. <react> They {=slowly} shared the {c} {z}, and <friend>
        |0=At {q} they [arrived|finished] together. <react> {^elder} {=slowly} kept the {c} {z}, and <friend>
        |-=At {q} {hero} was last by {n=few} steps. <react> {^pal} took the {c} {z} and jeered all the way to
        {p}.]""",
    "storm": """{hero} was caught by a [great|wild|bad] storm {p=places_a.in} with <palthe>. They had
        {=qual.a} {l=lights} and {=qual.a} {c=colors} {a=cloths}. They {=went} into {h=shelters.a}, and {hero}
        put the {a}
        around {pal}. <on> [speech? +,0="[Will it stop|Are we safe|Hear that]?" asked {pal} {=slowly}.
        |-={pal} {=slowly} [shook|trembled].] [mood?
        +={hero} lit the {l} and told [funny|merry] tales. <react> The {c} {a} was [warm|snug], and <friend>
        |0=They let the {l} burn down. <react> {^pal} folded the {c} {a} in the {h}, and <friend>
        |-=The wind blew out the {l}. <react> The {c} {a} was [soaked|torn], the {h} leaked, and <friend>]""",
    "secret": """{hero} [saw|was shown] the {=qual} den of <palthe>, behind {=qual.a} {b=colors} {a=landmarks}
        {p=places_c.in}. The password was
        {w=words}. [speech? +,0="[Tell no one|Keep it safe|Swear it]," said {pal} {=slowly}.|-={hero}
        {=slowly} [nodded|swore].]
        They hid {=qual.a} {t=treasures} there. <on> {^=spans} later {elder=elders} [asked|spied]. [mood?
        +={hero} {=slowly} kept still. <react> Behind the {b} {a} {hero.he} said {w}, got the {t}, and <friend>
        |0={hero} {=slowly} told of the {a}, not of {w}. <react> So the {t} was still there, and <friend>
        |-={hero} {=slowly} told of the {b} {a} and {w}. <react> So the {t} was gone, and <friend>]""",
    "contest": """{hero} joined a {s=skills.ing} contest {p=places_a.in}, with <pal> and {v=rivals}.
        {elder=elders} gave
        {=qual.a} {c=colors} {z=prizes} for it. [speech? +,0="[I never lose|Watch me|Go home]," said {v}
        {=slowly}.
        |-={v} {=slowly} [boasted|showed off].] First {v} [slipped|sneezed|stumbled], then {pal}
        {=slowly} [began|bowed]. <on> [mood?
        +=But {hero} was the [best|finest] {s.er}. <react> {^elder} gave {hero.him} the {c} {z}, and {v}
        {=regard+}.
        |0=In the end {pal} was the better {s.er}. <react> {^pal} got the {c} {z}, and {v} {=regard0}.
        |-=But {v}, the worst {s.er}, had cheated. <react> {^v} got the {c} {z}, and <friend>]""",
    "monster": """{hero} heard a [terrible|loud|strange] {n=noises} {p=places_c.in}. [speech? +,0="[It is a
        monster|Run|Do not
        go]," {=slowly} said <palthe>.|-=<pal> {=slowly} [hid|fled].] {hero} took {=qual.a} {l=lights} and
        {=slowly} {=went} there. <on> It was
        {=traits.a} {b=colors} {a=beasts} named {v=rivals}, stuck in {=qual.a} {w=landmarks}. [mood?
        +={hero} {=slowly} freed {v.him}. <react> The {n} had been a cry for help, and {v} gave {pal} a ride
        too.
        |0={hero} {=slowly} put down the {l} and freed {v.him}. <react> The {n} stopped, and <friend>
        |-={hero} {=slowly} ran and dropped the {l}. <react> Nobody freed the {b} {a}, and the {n} went on
        {p.in}.]""",
}
