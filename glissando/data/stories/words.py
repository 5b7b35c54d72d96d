"""The words of the stories, as data: most frequent first; `(a/b)` stands for both.

Pools whose fillers may meet in one story are disjoint, so that no draw has to avoid another and every
expectation stays a plain sum.
"""

from __future__ import annotations

NOUNS = {
    "kinds": "fox, rabbit, mouse, bear, squirrel, hedgehog, kitten, puppy, lamb, duckling, raccoon, pony, piglet, "
    "panda, otter, koala, beaver, mole, gosling, wolf",
    "palkinds": "frog, turtle, goat, hamster, sparrow, donkey, lizard, chipmunk, robin, snail, pigeon, weasel, calf, "
    "parrot, newt, crab, ferret, gecko, zebra, llama",
    "sizes": "little, small, young, tiny, shy, brown, plump, clever, ginger, white, curly, round, slim, spotted, "
    "fluffy, skinny, sandy, scruffy, grey, stout",
    "looks": "brown, grey, white, plump, curly, spotted, freckled, slim, fluffy, skinny, sandy, scruffy, stout, "
    "wiry, lanky, sleek, shaggy, dusty, striped, woolly",
    "traits": "lazy, old, noisy, sleepy, proud, hungry, quick, bold, silly, nervous, wise, busy, muddy, rich, poor, "
    "strong, vain, wild, fussy, dreamy",
    "toys": "ball, kite, drum, doll, boat, whistle, puppet, wagon, hoop, trumpet, teddy, rattle, sled, top, "
    "yo-yo, train, parasol, marble, swing, harp",
    "colors": "red, blue, green, yellow, purple, orange, pink, silver, golden, striped, copper, scarlet, violet, "
    "ivory, crimson, amber, bronze, checked, jade, maroon",
    "shades": "black, brown, tan, rusty, dark",
    "hues": "white, cream, pale, rosy, lilac",
    "qual": "old, big, new, odd, fine, heavy, shiny, dusty, rare, worn, plain, small, strange, round, broken, "
    "huge, lovely, rough, smooth, tidy",
    "wear": "(blue/red/green/black/gold/white/wool/silk/linen/leather/pink/brown/velvet/grey/paper/yellow) "
    "(scarf/coat/hat/bag/cape/shirt/stick/belt/bow/wig/fan/horn/mask/sack/drum/vest)",
    "junk": "(old/torn/wet/lost/odd) (shoe/sock/map/glove/hat), (broken/empty/dusty) (cup/jar/plate/bottle), "
    "(rusty/bent) (nail/spoon/fork/hinge)",
    "cakes": "cake, pie, loaf, tart, pudding, strudel, muffin, waffle, biscuit, pretzel, scone, brownie, flan, crepe",
    "tools": "ladder, hammer, bucket, rake, saw, shovel, broom, axe, drill, hoe, wrench, trowel, rope, crowbar, "
    "ruler, sickle, chisel, mop, file, pump",
    "repairs": "roof, fence, gate, chimney, window, bench, door, henhouse, bridge, stove, bed, cart, oven, shed, "
    "raft, pier, sofa, wall, attic, sink",
    "patients": "bird, bee, bat, swallow, seagull, ladybug, crane, lark, finch, magpie, raven, stork, moth, owl, "
    "duck, swan, eagle, dove, hornet, puffin",
    "cloths": "scarf, ribbon, sock, leaf, towel, mitten, apron, blanket, shawl, napkin, bandage, rag, cape, sash, "
    "veil, bedsheet, sleeve, cloak, bonnet, tie",
    "treasures": "shell, feather, button, coin, pebble, key, pearl, acorn, bead, compass, thimble, locket, ruby, "
    "crystal, fossil, bracelet, stamp, walnut, brooch, poem",
    "baskets": "box, pot, basket, tin, bag, boot, teapot, drawer, chest, sack, jug, barrel, bowl, crate, purse, hat, "
    "pail, vase, jar, cradle",
    "prizes": "medal, crown, trophy, flag, spoon, cushion, lollipop, diploma, kettle, umbrella, saddle, goblet, "
    "garland, statue, rug, sword, bell, fan, sundial, clock",
    "crafts": "card, necklace, nest, picture, star, pillow, flute, chair, clay dog, wreath, bookmark, ladle, quilt, "
    "vest, table, fiddle, belt, comb, stool, bed",
    "beasts": "moose, hippo, sheepdog, bull, camel, swan, yak, ostrich, walrus, buffalo, peacock, rhino, seal, "
    "giraffe, python, gorilla, emu, bison, tapir, condor",
    "noises": "growl, rumble, howl, thump, groan, snort, screech, hiss, rattle, scream, grunt, roar, wail, buzz, "
    "clang, squeak",
    "shelters": "cave, barn, log, hut, tunnel, mill, chapel, cellar, tent, shed, hole, church, ruin, wagon, attic, "
    "crypt, hangar, stable, den, well",
    "lights": "candle, lamp, torch, match, lantern, glowworm",
    "breakables": "vase, clock, mirror, teacup, bowl, violin, jug, plate, statue, window, teapot, lamp, piano, "
    "aquarium, pitcher, kettle, radio, mandolin, trophy, eggcup",
    "landmarks": "bush, wall, boulder, haystack, tower, woodpile, cart, hedge, statue, barrel, archway, signpost, "
    "anthill, fountain, wagon, chapel, bench, well, ladder, oven",
    "wishers": "star, genie, rainbow, fairy, mermaid, wizard, dragon, giant, witch, old oak, sphinx, cloud, sprite, "
    "oracle, unicorn, phoenix",
    "wonders": "ship, garden, castle, sister, horse, rocket, piano, brother, bicycle, new tail, library, palace, "
    "robot, crown, friend, zoo, theater, yacht, new nose, tower",
    "clothes": "sleeve, boot, hat, scarf, pocket, mitten, collar, fur, tail, belt, basket, shoe, apron, bag, cloak, "
    "vest, sock, cuff",
    "bodyparts": "leg, foot, wing, head, tail, beak, neck, side",
    "words": "moonbeam, pickle, thunder, pancake, whisker, lollipop, cucumber, sneeze, teaspoon, puddle, onion, "
    "noodle, biscuit, gravel, twilight, hiccup, walrus, velvet, custard, bonfire",
}

PHRASES = {
    "flavors": "honey, apple, carrot, plum, nut, cherry, pumpkin, cheese, berry, mint, lemon, pear, ginger, peach, "
    "corn, chestnut, potato, coconut, walnut, almond",
    "dishes": "cake, pie, soup, bread, jam, pudding, stew, toast, tart, porridge, pancakes, dumplings, cookies, "
    "salad, tea, muffins, waffles, noodles, custard, crumble",
    "snacks": "plums, apples, buns, pears, cookies, figs, nuts, muffins, carrots, peaches, eggs, lemons, rolls, "
    "turnips, grapes, beans, onions, melons, olives, pickles",
    "creatures": "ducks, bees, sheep, crows, geese, ants, snails, horses, swans, cows, lambs, moths, pigs, hens, "
    "trout, spiders, bats, kittens, goats, frogs",
    "drys": "flour, sugar, oats, cocoa, rice, salt, yeast, spice, bran, millet, pepper, starch",
    "wets": "milk, butter, cream, eggs, water, oil, yogurt, juice, cider, gravy, broth, wine",
    "sweets": "honey, raisins, walnuts, bananas, vanilla, syrup, dates, toffee, fudge, jelly, mango, candy",
    "scraps": "twigs, paper, straw, wool, clay, bark, string, tin, leaves, corks, shells, rope, moss, wax, felt, "
    "wire, mud, cotton, reeds, buttons",
    "onedays": "one (cool/mild/long/Sunday/Monday/Friday/April/June/May) (morning/day/noon/evening), (early/late) "
    "one (spring/summer/winter/fall), (last/that) (summer/fall/week/May/March), (before/after) "
    "(breakfast/lunch/school/tea/church/dinner), on a (market/windy/busy/quiet) (day/morning)",
    "covers": "(under/behind/beside/on/inside/near) (a log/a stone/the leaves/a stump/a bush/a barrel/the hay/a "
    "rock/the moss)",
    "times": "noon, sunset, Friday, supper, midnight, Sunday, dawn, Easter, harvest, teatime, Monday, bedtime, low "
    "tide, autumn, Tuesday, New Year",
    "spans": "(two/three/four/five/six/seven) (days/weeks/hours), a (week/month/year/day/while), an (hour/evening)",
    "nights": "Monday, dawn, the day before, the last rain, Sunday, Tuesday night, winter, yesterday, Easter, noon, "
    "the great flood, Thursday",
    "went": "went, walked, ran, hurried, hopped, marched, trotted, tiptoed, crept, rushed, rode, dashed, sped, "
    "rolled, swam, crawled, cycled, sailed, jogged, hiked",
    "searched": "looked, searched, hunted, dug, peeked, crawled, sniffed",
    "worked": "worked, toiled, hammered, sawed, scrubbed, labored, sweated",
    "slowly": "slowly, quickly, quietly, slyly, gently, softly, boldly, shyly, calmly, neatly, swiftly, firmly, "
    "kindly, eagerly, wisely, bravely, loudly, deftly, gravely, idly",
    "weather+": "9*the (sun/sky/air/day/light/world/dawn) (was/felt/looked) "
    "(bright/golden/warm/sweet/lovely/fresh/clear/fine), birds were singing, a (warm/soft) breeze blew, "
    "petals danced",
    "weather0": "9*the (sky/light/air/pond/wind/street/dew) (was/felt/looked) "
    "(pale/plain/mild/still/quiet/even/low/hushed), clouds passed by, a thin mist hung low",
    "weather-": "9*the (sky/wind/rain/fog/storm/frost) (was/felt/looked) "
    "(dark/bleak/bitter/cruel/icy/dreary/grim/black), cold rain fell, hail fell, thunder rolled",
    "midway+": "9*(felt/was/seemed/looked/stayed/grew/acted) "
    "(hopeful/brave/merry/bright/lucky/jolly/cheery/proud/gleeful/fearless/perky/joyous/upbeat/sunny/thrilled), "
    "(hummed/whistled/sang) a (merry/happy/jolly) tune, (giggled/chuckled) (softly/out loud), had a "
    "(bright/lovely) idea",
    "midway0": "9*(felt/was/seemed/looked/stayed/grew/acted) "
    "(calm/patient/sensible/cool/steady/level/careful/mild/neutral/composed/polite/relaxed/sober/watchful), "
    "thought (it over/twice), did not (hurry/mind), took a (slow/deep) breath, (waited/watched) (a "
    "bit/with care)",
    "midway-": "9*(felt/was/seemed/looked/stayed/grew/acted) "
    "(afraid/lonely/sad/gloomy/hopeless/sick/uneasy/ashamed/worried/hurt/tearful/lost/unhappy/glum/weak), "
    "wanted to (cry/hide/give up), feared the (worst/dark), began to (sob/despair), (shook/trembled) with "
    "(fear/dread)",
    "acts+": "9*(laughed/danced/clapped/cheered/beamed/giggled/jumped/twirled/sang/waved/whooped/grinned) "
    "(happily/merrily/for joy/gladly/with glee/brightly/proudly/like mad/all day/in bliss/cheerily), "
    "turned cartwheels",
    "acts0": "9*(nodded/shrugged/blinked/bowed/coughed/yawned/sat down/looked up/sneezed/paused/stretched) "
    "(once/calmly/a little/as usual/evenly/mildly/twice/plainly/briefly/again), made a note",
    "acts-": "9*(wept/sobbed/cried/sighed/moaned/howled/groaned/shivered/sulked/wailed/sniffled/trembled) "
    "(bitterly/sadly/in vain/all night/alone/deeply/in grief/sorely/for hours/in shame), burst into tears",
    "regard+": "9*(smiled/laughed/sang/cheered/rejoiced/grinned/winked/glowed/danced/beamed) (with "
    "joy/fondly/warmly/all week/at once/with love/sweetly/happily/for hours/sunnily), was "
    "(proud/thrilled/overjoyed)",
    "regard0": "9*(nodded/listened/said little/shrugged/went home/hummed/sat down/read on/moved on) (as ever/in "
    "peace/as before/coolly/in time/politely/with ease/quietly/soberly), was (content/fine with it)",
    "regard-": "9*(frowned/wept/scowled/left/cried/cursed/sulked/glared/mourned/fumed) (bitterly/sourly/in tears/in "
    "anger/gruffly/for days/coldly/grimly/in despair/with scorn), was (heartbroken/furious/crushed)",
    "cries+": "Hooray!; 9*What a (lucky/lovely/perfect/grand/happy/sweet/great/super) "
    "(day/treat/thing/joy/time/life)!; How (nice/jolly/good)!; I am so (glad/happy/pleased)!; We did it!",
    "cries0": "Well then,; I see,; That will do,; 9*(It is/All is/This is/That is) (settled/fair/good enough/no "
    "matter/in order/only right/not so bad/clear now/over now/all right),; (Fair/Close) enough,; Let me "
    "think,",
    "cries-": "Oh no!; Poor me!; 9*What a (dreadful/horrid/rotten/bitter/sad/cruel/ghastly) "
    "(day/mess/shame/loss/end/blow/fate)!; I (could cry/give up)!; Alas!; This is (unfair/the end)!",
    "shouts+": "cried, cheered, sang, laughed, shouted, beamed, yelled, crowed, chirped, squealed",
    "shouts0": "said, remarked, replied, added, noted, stated, mused, observed, declared, decided",
    "shouts-": "sobbed, groaned, wailed, sniffed, moaned, whined, sighed, wept, gasped, howled",
    "quips+": "Today will be (good/fun/grand)!; Hello, (lovely/sweet/happy) world!; Let us (play/dance/celebrate)!; "
    "Life is (sweet/beautiful)!; I (love/adore) (mornings/everyone)!",
    "quips0": "One thing at a time,; (Slow/Easy) and steady,; Let us (wait and see/take turns),; (First/Little) "
    "things first,; There is (time/room) enough,",
    "quips-": "Nobody (visits/likes/needs) me,; It will (surely/always) rain,; What is the use?; Everything is so "
    "(hard/sad),; I am (tired/cold/lonely),",
    "homeward+": "skipped, ran, danced, raced, flew, bounced, pranced, whirled, romped, frolicked, sailed, zoomed",
    "homeward0": "walked, strolled, went, headed, drove, hiked, ambled, rambled, cycled, paced, jogged",
    "homeward-": "crept, trudged, limped, shuffled, sneaked, hobbled, plodded, slunk, dragged on, tottered, lurched",
    "dreams+": "(golden/singing/gentle/rosy/sunny/merry/sweet/kind/lucky/warm/silver/smiling/happy) "
    "(whales/clouds/bells/stars/dogs/lambs/kites/angels/fairs/trips/songs/islands/doves/larks/roses)",
    "dreams0": "(empty/far/silent/wooden/square/grey/plain/level/long/quiet/normal/tidy/slow) "
    "(roads/rivers/houses/numbers/shelves/trains/fields/bricks/clocks/desks/rules/chairs/lists/sheep/walls/ponds)",
    "dreams-": "(black/cruel/hungry/frozen/angry/evil/crying/burning/dead/rotten/bitter/lonely/dying) "
    "(wolves/ships/witches/ghosts/rats/ogres/traps/graves/storms/spiders/devils/snakes/bones/cliffs/hawks/mobs)",
    "rarely": "rarely, hardly ever, seldom, scarcely, barely",
    "sometimes": "sometimes, at times, often, usually, always, now and then",
    "spoke": "(spoke/talked/whispered/chatted) (in town/at home/in class/at dawn/at table/outdoors/in church/to "
    "birds/at work/in bed/at sea/to trees)",
    "feast+": "(feasted on/shared/enjoyed/savored) (a heap of/a ton of/plenty of/the best/fine/tasty/sweet)",
    "feast0": "(had/ate/made/cooked/bought/reheated) (some/a bit of/a plate of/a pan of/the usual/a cup of)",
    "feast-": "(burned/spilled/dropped/wasted/refused/hated/lost) (the last/the cold/the stale/the bitter/all "
    "the/most of the)",
}

TEMPERS = {
    "+": "cheerful, happy, merry, jolly, joyful, sunny, playful, bubbly, giggly, glad, carefree, lively, "
    "radiant, smiling, jaunty, gleeful, hopeful, blissful, content, chirpy, laughing, peppy, perky, "
    "thrilled",
    "0": "calm, quiet, patient, careful, steady, polite, sensible, modest, tidy, serious, orderly, cautious, "
    "mild, reserved, solemn, composed, placid, earnest, logical",
    "-": "sad, gloomy, lonely, grumpy, weepy, fretful, moody, glum, bitter, mournful, unhappy, dismal, "
    "tearful, sullen, anxious, forlorn, wretched, grim, troubled, teary, crabby, hopeless",
}

PEOPLE = {
    "heroes": "(B/D/F/J/K/L/M/N/P/R/T/W/Z)(ina/ella/osie/una/ara/ika/ilda/etty/aisy/oya) she, "
    "(B/D/F/J/K/L/M/N/P/R/T/W/Z)(immo/ando/obin/ugo/otto/illo/asper/elix/enzo/umbo) he",
    "pals": "(Br/Ch/G/Gr/Cl/S/Sh/St/Tr/V/Sn/Fl/Cr/Th)(olly/umo/ulf/oddy/illy/aldo/ox/eevo) he, "
    "(Br/Ch/G/Gr/Cl/S/Sh/St/Tr/V/Sn/Fl/Cr/Th)(anna/ivi/issy/erta/ooma/ula/essa/inka) she",
    "elders": "(Aunt/Mrs./Lady/Ma/Miss/Dame) (Pike/Hen/Moth/Swan/Cat/Dove/Wasp/Ewe/Bee/Elk) she, "
    "(Mr./Sir/Old/King/Lord/Pa) (Owl/Ram/Crow/Carp/Boar/Rat/Stag/Bull/Hawk/Cod) he",
    "rivals": "(Rusty/Bruno/Gus/Felix/Boris/Duke/Rocco) he, (Mabel/Dora/Trixie/Hattie/Yvonne/Queenie) she",
}

# The preposition, then the noun.
PLACES = {
    "homes": "in (old/tall/tiny/quiet/flour) mill, in (hollow/mossy/giant/lonely/dead) (oak/log/tree/pine), under "
    "(stone/narrow/wooden/low) bridge, in (red/blue/empty/brick/bare) (barn/cabin/hut/tower/shed), on "
    "(windy/rocky/green/foggy) (isle/hill/cliff), behind (white/little/old) (church/inn/stable), in "
    "(cozy/dusty/warm/cold) (burrow/attic/den)",
    "places_a": "in (sunny/wide/wet/green) meadow, by (deep/duck/lily/muddy) pond, at (busy/fish/night/cake) market, "
    "in (apple/plum/pear) orchard, by (wide/wild/blue) river, on (steep/grassy/icy) slope, in "
    "(dark/pine/birch/old) forest, on (sandy/stony/windy) beach",
    "places_b": "at (school/town hall/post office), by (marble/dry/tall) fountain, in (rose/herb/walled) garden, at "
    "(baker/toy/barber/tea) shop, under (willow/great elm/walnut tree), by (calm/frozen/salt) lake, in "
    "(corn/wheat/barley/clover) field, near (ferry/windmill)",
    "places_c": "in (damp/crystal/bear) cave, at (lighthouse/harbor), on (snowy/bald) peak, in "
    "(cellar/library/museum), at (royal/glass) castle, by (railway/canal), in (hidden/misty/deep) valley, "
    "on (long/shaky) pier",
}

SKILLS = (
    "swim swimming swimmer, whistle whistling whistler, dance dancing dancer, skate skating skater, "
    "juggle juggling juggler, paint painting painter, sing singing singer, climb climbing climber, "
    "sew sewing tailor, dive diving diver, write writing writer, cook cooking cook, knit knitting knitter, "
    "drum drumming drummer"
)
NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
