"""The words that microworlds are made of, and the rule that keeps some combinations apart.

Every name is a combination of two words from fixed inventories ("Bratis Gildane", "Amber Harbor",
"North Valdon", "Cidex Pictures"). The tokenizer has one token for each of these words, so a model can
copy any name as two tokens; because a name is only a combination, it can't be learnt by heart.

`is_held_out` splits the combinations in two by a hash, once and for all. Pretraining worlds and training
questions are made of the combinations that are not held out; the chains of facts behind test questions
are made of held-out ones alone (see `data_prep.microworld`).
"""

from __future__ import annotations

import hashlib
import random


def _words(text: str) -> list[str]:
    return text.split()


FIRST_NAMES = _words("""
Baman Bikia Bradel Bratis Breria Britan Brunia Bruris Bunan Ceki Ceman Cisa Crile Croken Crolo Crumin
Cruren Cumen Cusan Dera Doman Dore Dreli Drodan Drotel Dunan Duti Fimi Firis Fito Flaris Flemi Flusan
Fonel Fuvi Fuvis Gedan Goma Govel Granel Grasan Greno Hava Heda Horen Hukis Hutin Jevo Jome Keki Koke
Komis Kono Kramo Krete Krevi Krimel Linin Lomi Luken Mikia Mimi Munia Naki Nesis Nova Nukan Nusan Pamis
Pivi Poman Pona Prato Priti Prolo Pronin Puten Quaman Quani Quulis Rero Rivin Rulin Staden Stikin Stinia
Stova Stulan Stulis Suden Tedo Tikia Tikin Trino Truven Truvia Vome Welia Weta Woro Wudan Wuken Zedi
Zokis
""")

LAST_NAMES = _words("""
Bankaw Bisken Bolmard Boltane Braltun Brelden Brondov Brultun Cessard Cildov Cirkell Coltaw Craltaw
Cunkov Dasker Dastane Dirtick Drisser Dulten Durkey Faldun Faxaw Festell Filmane Flarkov Flartey Floskun
Flurker Galder Gandey Gildane Gilmun Gindeck Gistick Goldaw Griltey Grinkey Grumbey Gultun Gurker Gussov
Hustaw Jeldell Jinkell Kaskaw Kenkard Kerken Kirkeck Kixov Krarter Krildaw Krirtaw Krussey Kulmell
Kuskane Liskun Lissick Lolmard Lorter Lundick Moldov Nerkard Nonkey Norkane Paltard Pendane Praster
Prolden Proxell Quelmaw Quexaw Rarten Relmeck Relmey Rerkaw Ristov Seskaw Solmov Stalmen Stelmer Stelmov
Sunkick Sustell Timbeck Tondaw Tostun Traldov Tralmaw Trertov Tristen Trister Trumber Tultov Tundard
Tunkey Turkun Velmaw Vonkard Wandun Weskard Wolmard Woltaw Wurten Wuskaw Wuxick Zasker Zirkey Zisker
""")

PLACE_PREFIXES = _words("""
North South East West New Old Port Lake Upper Lower Fort Mount
""")

PLACE_WORDS = _words("""
Bamdon Bangate Brorby Bungate Cetgate Cethdon Cimby Cimwick Cosdon Cutmoor Dirby Doldon Donwick Dosford
Dretham Dumford Fasmoor Flerdon Flolby Fondon Fovmere Gemvale Gevby Gilvale Grisby Grotby Guthdon
Havmere Hisby Jandon Jarford Jasdon Jivmere Jolgate Jonford Jummoor Kesby Kesmere Kivham Korwick Kramham
Kratdon Kungate Lelwick Lemwick Limmere Molvale Nalford Nurmere Porby Prirby Putford Quasby Quelby
Quemham Quinby Quondon Rolmere Semby Sivwick Stundon Telmoor Trulby Valdon Vinvale Vovmere Watmere
Wavvale Wurmere Zivham Zomham
""")

BRANDS = _words("""
Baleo Bavara Bexor Birum Bixum Bonor Bozux Bravum Brivara Burum Cidex Conor Craliq Craniq Cranyx Creror
Cririq Cruveo Cuvor Dalix Damix Darum Devara Dramix Dramux Drelix Drulum Druxex Flevux Flivon Flodux
Floxara Fovara Gradeo Grunon Gruzos Gunum Hador Himos Hizum Kaziq Kinyx Krexor Krezara Krumyx Kumara
Loxara Madon Marex Melix Muveo Nilon Noron Noxara Povum Poxum Prinux Pulyx Quuron Remeo Rerum Rudara
Ruvix Staxiq Suvon Taron Tazix Tralyx Vizum Vumiq Wenyx Werux Wonon Wulix Wumos Wuxum
""")

COMPANY_WORDS = _words("""
Pictures Studios Press Books Works Motors Systems Foods Group Partners Brothers Industries Trading
Holdings
""")

TITLE_WORDS = _words("""
Amber Silver Crimson Hidden Silent Broken Distant Frozen Golden Hollow Burning Secret Velvet Winter
Summer Midnight Lonely Ancient Gentle Bitter Crooked Painted Scarlet Wandering Restless Stolen Final
Second Paper Iron Copper Marble Glass Wooden Electric Savage Tender Quiet Sleeping Falling Rising
Vanished Forgotten Endless Empty Sacred Wicked Noble Faded Sunken Shattered Whispering Dancing Invisible
Emerald Ivory Cobalt Violet Autumn Northern
""")

FILM_NOUNS = _words("""
Harbor Bridge Garden Horizon Shadow Kingdom Mirror Tower Valley Storm Island Canyon Lantern Station
Passage Fortress Circus Signal Voyage Parade Avenue Desert Engine Balcony Carnival Corridor Frontier
Tunnel Hotel Railway Stadium Theater Summit Market Chapel Palace Cellar Meadow Jungle Lagoon
""")

NOVEL_NOUNS = _words("""
Letters Orchard Diary Sonata Feather Chronicle Lullaby Testament Riddle Confession Portrait Memoir Elegy
Ballad Fable Prophecy Manuscript Notebook Legend Psalm Promise Whisper Secretary Widow Daughter Gardener
Clockmaker Librarian Sailor Physician Beekeeper Painter Shepherd Prisoner Stranger Orphan Apprentice
Cartographer Astronomer Governess
""")

RIVERS = _words("""
Alira Alowa Aluka Anana Anara Asoka Elelo Enoth Erena Erilo Evend Evish Evith Ilora Iniwa Isira Isosh
Ivend Ivith Olena Olika Onena Oniwa Orena Orond Osash Osawa Osena Osend Osind Osuth Ovaka Ovuwa Uneka
Unish Urolo Usara Usura
""")

REGIONS = _words("""
Bamania Demania Domania Duvaria Favovia Fivoria Foloria Fovonia Gimania Gulalia Havoria Honalia Hosalia
Jalalia Jemania Kolaria Lelovia Momaria Nisoria Panania Parania Pimania Posalia Ranonia Ruvaria Sosalia
Tovaria Varovia Visovia Vumalia Wororia
""")

INSTRUMENTS = _words("""
violin piano trumpet cello flute guitar drums harp oboe clarinet banjo accordion mandolin saxophone
trombone tuba organ viola bassoon ukulele
""")

PRODUCTS = _words("""
bicycles cameras carpets candles clocks umbrellas cheese furniture toys shoes boats soap paint tractors
radios pencils mirrors chocolate textiles telescopes ceramics batteries bottles engines
""")

YEARS = [str(year) for year in range(1900, 2000)]

# kind of name -> (first words, second words)
NAME_PARTS = {
    "person": (FIRST_NAMES, LAST_NAMES),
    "film": (TITLE_WORDS, FILM_NOUNS),
    "novel": (TITLE_WORDS, NOVEL_NOUNS),
    "company": (BRANDS, COMPANY_WORDS),
    "place": (PLACE_PREFIXES, PLACE_WORDS),
}
# kind of plain value -> its words
VALUES = {
    "river": RIVERS,
    "region": REGIONS,
    "instrument": INSTRUMENTS,
    "product": PRODUCTS,
    "year": YEARS,
}
HELD_OUT_SHARE = 5  # one combination in five


def is_held_out(kind: str, name: str) -> bool:
    """Whether the name (two words) of this kind is reserved for test questions.

    A pure function of its arguments, the same on every machine: one name in `HELD_OUT_SHARE` is held out.
    """
    digest = hashlib.blake2b(f"{kind}|{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def draw_names(rng: random.Random, kind: str, count: int, held_out: bool) -> list[str]:
    """`count` different names of a kind, all held out or none of them."""
    first_words, second_words = NAME_PARTS[kind]
    limit = len(first_words) * len(second_words) // (2 * HELD_OUT_SHARE)
    if held_out and count > limit:
        raise ValueError(
            f"{count} held-out {kind} names asked for, at most {limit} can be drawn: make a smaller world"
        )
    names: dict[str, None] = {}
    while len(names) < count:
        name = f"{rng.choice(first_words)} {rng.choice(second_words)}"
        if is_held_out(kind, name) == held_out:
            names[name] = None
    return list(names)
