#!/usr/bin/env python3
"""Builds sample-train.tar and sample-test.tar from Debian's openclipart-png package.

    apt-get download openclipart-png
    dpkg -x openclipart-png_*.deb unpacked
    pip install pillow==13.0.0 numpy==2.4.6
    python3 datasets/build_sample.py unpacked            # writes the two tars beside this script
    python3 datasets/build_sample.py --check             # counts, checksums and raw-pixel kNN of the tars

The result depends on nothing but the package and the Pillow version: every choice is by sorted path or by
the SHA-256 of the path, and the near-duplicate test is exact integer arithmetic. SAMPLE.md is the card.
"""

import argparse
import hashlib
import io
import sys
import tarfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 64
CAP = 250  # most images of one class
SERIES_CAP = 120  # most images of a class that one hand drew as a series: they would be half of the set otherwise
SERIES = ("buttons", "cards", "icons-colour", "icons-grey", "patterns", "pictograms", "shapes", "stars")
TEST_SHARE = 0.15
MAX_PIXELS = 50_000_000  # the package holds clip art of 21000 x 30000 pixels
Image.MAX_IMAGE_PIXELS = None  # `load` has its own limit
MIN_INK = 0.02  # share of pixels darker than 200 in some channel; below it an image is nearly blank
NEAR = 50  # near-duplicate: squared distance below 1/NEAR of the two images' squared distance from white

# Class -> path patterns below openclipart/png, `!` excludes. `*` also crosses `/`. The first class that matches
# takes the image, and of near-duplicates the first in this order stays: objects come before icons.
CLASSES = {
    "animals": """
        animals/*
        unsorted/[Aa]natra* unsorted/[Cc]olombo* unsorted/Pinguino* unsorted/cammello* unsorted/elefant*
        unsorted/gabbiano* unsorted/mucca* unsorted/papera* unsorted/pecorella* unsorted/pennuto*
        unsorted/pescetto* unsorted/struzzo* unsorted/striscia_agnellini*
        !animals/2_dead_frogs* !animals/birds/turkey_on_platter* !animals/cani_e_gatti* !animals/cymru_flag*
        !animals/fantasy/mermaid* !animals/fish/kallisti-grenade* !animals/lucchetto* !animals/*scrathing_post*
        !animals/mascot_* !animals/three_eyes* !animals/bugs/zanzara_cretina* !animals/*tux* !animals/tatoo*
    """,
    "vehicles": """
        transportation/ambulans* transportation/autos_* transportation/bicycle* transportation/big_truck*
        transportation/bike_* transportation/blazer* transportation/bmw* transportation/boating/boat_*
        transportation/boating/sail* transportation/bus* transportation/car_* transportation/dodge*
        transportation/fire_engine* transportation/formula_one* transportation/hummer_* transportation/motorcycle*
        transportation/old_car* transportation/old_truck* transportation/pallone* transportation/plane*
        transportation/redcar* transportation/road_runner* transportation/shelby* transportation/skoda*
        transportation/small_truck* transportation/soviet_shuttle* transportation/toyota* transportation/tramway*
        transportation/truck* transportation/vehicles/* transportation/roadsigns/bus_symbol*
        recreation/holiday/sportcar* unsorted/Montacarichi*
        unsorted/ambulanza* unsorted/betoniera* unsorted/caterpillar* people/fire_engine*
        !transportation/boating/sailing_[cjprt]* !transportation/vehicles/crossroads*
        !transportation/vehicles/curve_ahead* !transportation/vehicles/cycle_route*
        !transportation/vehicles/lighthouse* !transportation/vehicles/military* !transportation/vehicles/cycle_lane*
        !transportation/bus_lane* !transportation/bus_opposite* !transportation/buses*
    """,
    "buildings": """
        buildings/* computer/home[0-9]* computer/residential_house* transportation/vehicles/lighthouse*
        computer/building_zazou* unsorted/Condominio* unsorted/aziendaVendite* unsorted/fattoria*
        unsorted/grattacieli* unsorted/igloo*
        signs_and_symbols/map_symbols/castle*
        !buildings/furniture/* !buildings/brick* !buildings/church* !buildings/old_sign* !buildings/wall*
        !buildings/demolizione* !buildings/school_hallway*
    """,
    "plants": """
        plants/* food/fruit/* food/vegetables/* signs_and_symbols/map_symbols/*tree_-_rpg*
        signs_and_symbols/map_symbols/plant_-_rpg* unsorted/foglie* unsorted/rosa[12]* unsorted/rose*
        !plants/cannabis* !plants/human* !plants/trees/bowsaw* !plants/trees/bypasspruner*
        !plants/trees/christmas_balls* !food/fruit/juice* !food/fruit/eris* !food/fruit/straw_tote*
        !food/fruit/lime_half* !food/fruit/tile_* !food/fruit/gumnut* !food/fruit/turkey*
    """,
    "food": """
        food/* animals/birds/turkey_on_platter* unsorted/Tacchino* unsorted/tramezzino* unsorted/biberon*
        !food/fruit/eris* !food/fruit/straw_tote* !food/fruit/lime_half* !food/fruit/tile_* !food/fruit/gumnut*
        !food/bread_and_wine* !food/chef* !food/toque*
    """,
    "people": """
        people/* unsorted/Traslocatore* unsorted/carpentiere* unsorted/imbianchino*
        unsorted/principessa* unsorted/ragazz* unsorted/signorina*
        !people/clothing/* !people/a_boy_plays* !people/a_happy_boy* !people/a_man_singing* !people/a_youngster*
        !people/backpacker_ganson* !people/bad_guy* !people/bodypart/hands_lorenzo* !people/bodypart/olifant*
        !people/brozo* !people/einstein* !people/elfish_girl* !people/enthusiast* !people/female_rollandin*
        !people/fire_engine* !people/fireman* !people/gender* !people/grampa* !people/grandpa* !people/hygieia* !people/jazz*
        !people/john_coltrane* !people/man_face_darek* !people/man_head_mikhail* !people/martin_luther*
        !people/maya_head* !people/safety_pin* !people/samoa* !people/saxowoman* !people/self_portrait*
        !people/sexy* !people/silhouette_* !people/silvia* !people/skull* !people/stripper* !people/stylized_yoga*
        !people/van_gogh* !people/smilies/crossbones* !people/smilies/portrait* !people/smilies/chav*
        !people/future_beckham* !people/io_donna*
    """,
    "recreation": """
        recreation/* unsorted/festoni* unsorted/fiocco* unsorted/ghirlande* unsorted/pesistica*
        !recreation/games/cards/* !recreation/religion/* !recreation/sports/nunchaku* !recreation/sports/volleball_net*
        !recreation/holiday/sportcar* !recreation/music/CD_Player* !recreation/park*
    """,
    "tools": """
        tools/* buildings/furniture/* unsorted/asse_da_stiro* unsorted/carretta* unsorted/guanti*
        unsorted/lampada_da_cantiere* unsorted/metro_avvolgibile* unsorted/motosega* unsorted/scala_doppia*
        unsorted/sega_per_legno* unsorted/serratura* plants/trees/bowsaw* plants/trees/bypasspruner*
        food/meatgrinder* animals/lucchetto* electronics/bulb/* containers/* office/*lamp* office/*bulb*
        !tools/weapons/* !tools/bucket_michael* !tools/gallows* !tools/insecticide* !tools/smoke* !tools/panel*
        !tools/paint_roller_wall*
    """,
    "office": """
        office/* education/* unsorted/blocco_notes* unsorted/pinzatrice* unsorted/tavolozza*
        !office/telephone/* !education/books/closed_bible* !education/school_in_fall* !office/arrow1*
        !office/cross_hand* !office/ink_* !office/large_braces* !office/milimetered* !office/reunion*
        !education/inservice*
    """,
    "electronics": """
        computer/* electronics/* office/telephone/* geography/garmin* geography/gps* geography/magelan*
        !computer/aviso* !computer/bb_* !computer/bluepane* !computer/browser* !computer/building*
        !computer/buttons/* !computer/chomper* !computer/clipboard* !computer/diagrams/* !computer/finestr*
        !computer/firewall* !computer/folders/* !computer/games/[pt]* !computer/gateway* !computer/gnu_linux*
        !computer/home* !computer/icons/* !computer/internet* !computer/jabbear* !computer/linux*
        !computer/logic_functions* !computer/model-view* !computer/mouse_pointer* !computer/munch*
        !computer/network* !computer/otto* !computer/residential* !computer/router_andy* !computer/teacher*
        !office/telephone/numero_verde* !electronics/bulb/* !electronics/saku_robot*
    """,
    "geography": """
        geography/* science/astronomy/* signs_and_symbols/map_symbols/hill_-* signs_and_symbols/map_symbols/mountain_-*
        !geography/arkansas* !geography/basque_patricia* !geography/calebasse* !geography/canada_umbrella*
        !geography/garmin* !geography/gps* !geography/magelan* !geography/mountain_seal* !geography/shi_ken*
        !geography/spyglass* !geography/symbol_for_a_church* !geography/teide* !geography/war_drum*
    """,
    "signs": """
        transportation/Motorway* transportation/Evel* transportation/bambi* transportation/cattle*
        transportation/crosswind* transportation/cycle* transportation/drawbridge* transportation/end_*
        transportation/grounded* transportation/horse* transportation/kaboom* transportation/lorry*
        transportation/bus_* transportation/buses* transportation/no_* transportation/old_folks* transportation/pass_either* transportation/roadsigns/*
        transportation/vehicles/crossroads* transportation/vehicles/curve_ahead* transportation/vehicles/cycle_*
        signs_and_symbols/*_yve* signs_and_symbols/*_yv_* signs_and_symbols/*_gui* signs_and_symbols/protection_obl*
        signs_and_symbols/sortie* signs_and_symbols/[BCDMRTV][a-z]*[A-Z]* signs_and_symbols/advertising*
        signs_and_symbols/ahead_only* signs_and_symbols/airplane* signs_and_symbols/attenzione*
        signs_and_symbols/bitte_keine* signs_and_symbols/bus* signs_and_symbols/danger* signs_and_symbols/defense*
        signs_and_symbols/disability/* signs_and_symbols/extremement* signs_and_symbols/facilement*
        signs_and_symbols/flamme* signs_and_symbols/hot_surface* signs_and_symbols/hydrant*
        signs_and_symbols/interdiction* signs_and_symbols/keep_tidy* signs_and_symbols/nfpa*
        signs_and_symbols/no.png signs_and_symbols/no_entrance* signs_and_symbols/no_smoking*
        signs_and_symbols/nosmoke* signs_and_symbols/nucleare* signs_and_symbols/radio[an]*
        signs_and_symbols/radiations* signs_and_symbols/recycl* signs_and_symbols/risque*
        signs_and_symbols/traffic_light* signs_and_symbols/tres_toxique* signs_and_symbols/wc_*
        signs_and_symbols/wheelchair* office/telephone/*sign*
        !signs_and_symbols/*/* !signs_and_symbols/BandeMarquage* !signs_and_symbols/nuage*
        !transportation/roadsigns/nws* !transportation/roadsigns/bus_symbol*
    """,
    "pictograms": """
        signs_and_symbols/map_symbols/*
        !*_-_rpg* !signs_and_symbols/map_symbols/compass* !signs_and_symbols/map_symbols/mapa*
        !signs_and_symbols/map_symbols/castle*
    """,
    "shapes": "shapes/arrows/* shapes/callouts/* shapes/flowchart/* shapes/jigsaw/*",
    "stars": "shapes/stars/*",
    "patterns": "special/patterns/*",
    "cards": """
        recreation/games/cards/*
        !*/audio_cassette* !*/brown_hair_boy* !*/celtic-vine* !*/photo_* !*/two_cats*
    """,
    "buttons": "computer/buttons/* signs_and_symbols/led/* buttons/*",
    # Two desktop themes: what they show is mixed, how they are drawn is not. Their `apps` folders are left out,
    # because they hold logos of products.
    "icons-grey": "computer/icons/flat-theme/* !computer/icons/flat-theme/applications/*",
    "icons-colour": "computer/icons/lemon-theme/* !*/apps/* !*/mimetypes/* !*/wallpaper* !*/samba* !*/hdd_*",
}

# Wherever it lies: an image whose content is missing ("Linked Image Not Found"), or that shows a flag or a party.
NEVER = "*penguin/tux_didier* animals/birds/duck_yellow* */creation_day_* *flag*"


def matches(path, patterns):
    patterns = patterns.split()
    return any(fnmatchcase(path, p) for p in patterns if p[0] != "!") and not any(
        fnmatchcase(path, p[1:]) for p in patterns if p[0] == "!"
    )


def class_of(path):
    if matches(path, NEVER):
        return None
    return next((name for name, patterns in CLASSES.items() if matches(path, patterns)), None)


def path_hash(path):
    return hashlib.sha256(path.encode()).digest()


def load(file):
    """Returns the picture as 64 x 64 RGB: composed on white, its white margin cut off, padded to a square."""
    with Image.open(file) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels")
        image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    white.alpha_composite(image)
    image = white.convert("RGB")
    ink = (np.asarray(image) < 250).any(axis=2)
    if not ink.any():
        raise ValueError("blank")
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    image = image.crop((int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1))
    scale = SIZE / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    square = Image.new("RGB", (SIZE, SIZE), (255, 255, 255))
    square.paste(image.resize((width, height), Image.Resampling.LANCZOS), ((SIZE - width) // 2, (SIZE - height) // 2))
    pixels = np.asarray(square)
    if (pixels < 200).any(axis=2).mean() < MIN_INK:
        raise ValueError("nearly blank")
    return pixels


def halve(pixels):
    """Returns 32 x 32 sums of 2 x 2 pixels, counted from white, as one row of whole numbers."""
    p = 255 - pixels.astype(np.int64)
    return (p[0::2, 0::2] + p[1::2, 0::2] + p[0::2, 1::2] + p[1::2, 1::2]).reshape(-1)


def without_near_duplicates(images):
    """Keeps the first of each group. Distances are whole numbers below 2^53, so float64 products are exact."""
    rows = np.stack([halve(pixels) for _, _, pixels in images]).astype(np.float64)
    energy = (rows * rows).sum(axis=1)
    products = rows @ rows.T
    kept = []
    for i in range(len(images)):
        sums = energy[kept] + energy[i]
        if not ((sums - 2 * products[i, kept]) * NEAR < sums).any():
            kept.append(i)
    return [images[i] for i in kept]


def encode(pixels):
    # Lossless: 2.3 kB an image, where JPEG at quality 90 (4:4:4) takes 2.1 kB and PNG 3.6 kB.
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "WEBP", lossless=True, quality=75, method=4, exact=True)
    return out.getvalue()


def write_tar(file, samples):
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (label, data) in enumerate(samples):
            for suffix, content in (("cls", str(label).encode()), ("webp", data)):
                member = tarfile.TarInfo(f"{number:06}.{suffix}")  # mtime, uid and gid are 0, mode is 644
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def build(source, out):
    root = next((p for p in (source, source / "usr/share/openclipart/png") if (p / "animals").is_dir()), None)
    if root is None:
        sys.exit(f"{source}: no folder `usr/share/openclipart/png` in it\nhint: dpkg -x openclipart-png_*.deb {source}")
    names = sorted(CLASSES)
    chosen, seen, skipped = [], set(), Counter()
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.png") if not p.is_symlink())
    order = {name: i for i, name in enumerate(CLASSES)}
    labelled = [(order[name], path, name) for path in paths if (name := class_of(path))]
    for _, path, name in sorted(labelled):
        try:
            pixels = load(root / path)
        except (OSError, ValueError, SyntaxError) as error:
            skipped[str(error) if str(error).endswith("blank") else "unreadable or too large"] += 1
            continue
        digest = hashlib.sha256(pixels.tobytes()).digest()
        if digest in seen:
            skipped["duplicate"] += 1
            continue
        seen.add(digest)
        chosen.append((name, path, pixels))
    unique = without_near_duplicates(chosen)
    skipped["near-duplicate"] = len(chosen) - len(unique)
    print(f"{len(paths)} files, {len(labelled)} in a class; left out: {dict(skipped)}")

    splits = {"train": [], "test": []}
    for label, name in enumerate(names):
        images = sorted((i for i in unique if i[0] == name), key=lambda image: path_hash(image[1]))
        kept = images[: SERIES_CAP if name in SERIES else CAP]
        cut = round(len(kept) * TEST_SHARE)
        splits["test"] += [(label, path, pixels) for _, path, pixels in sorted(kept[:cut], key=lambda i: i[1])]
        splits["train"] += [(label, path, pixels) for _, path, pixels in sorted(kept[cut:], key=lambda i: i[1])]
        print(f"{label:2} {name:13} {len(kept) - cut:4} train {cut:4} test   (of {len(images)})")
    for split, samples in splits.items():
        write_tar(out / f"sample-{split}.tar", [(label, encode(pixels)) for label, _, pixels in samples])


def read_tar(file):
    with tarfile.open(file) as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar]
    labels = np.array([int(data) for name, data in members if name.endswith(".cls")])
    images = [Image.open(io.BytesIO(data)).convert("RGB") for name, data in members if name.endswith(".webp")]
    return labels, np.stack([np.asarray(image) for image in images])


def vote(train, labels, test, k):
    """Returns the class that most of the k nearest training rows have, by cosine; ties go to the lower class."""
    train, test = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (train, test))
    nearest = np.argsort(-(test @ train.T), axis=1, kind="stable")[:, :k]
    return np.stack([np.bincount(row, minlength=len(CLASSES)).argmax() for row in labels[nearest]])


def check(folder, k=20):
    """Prints counts, checksums and the accuracy of nearest neighbours on 32 x 32 pixels, with and without centring."""
    labels, rows = {}, {}
    for split in ("train", "test"):
        file = folder / f"sample-{split}.tar"
        labels[split], images = read_tar(file)
        rows[split] = np.stack([4 * 255 - halve(image) for image in images]).astype(np.float64)
        mean, std = ((images / 255).mean(axis=(0, 1, 2)), (images / 255).std(axis=(0, 1, 2)))
        print(f"{file.name}: {len(images)} images, {file.stat().st_size} bytes")
        print(f"  sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}")
        print(f"  counts {np.bincount(labels[split]).tolist()}")
        print(f"  mean {mean.round(4).tolist()} std {std.round(4).tolist()}")
    largest = np.bincount(labels["test"]).max() / len(labels["test"])
    print(f"largest class of the test images: {100 * largest:.1f} %")
    for title, shift in (("raw", 0), ("centred", rows["train"].mean(axis=0))):
        hit = vote(rows["train"] - shift, labels["train"], rows["test"] - shift, k) == labels["test"]
        per_class = [round(100 * float(hit[labels["test"] == c].mean())) for c in range(len(CLASSES))]
        print(f"{title} 32 x 32 pixels, k={k}, cosine: {100 * hit.mean():.1f} %, by class {per_class}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?", help="folder that `dpkg -x` unpacked the package to")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder for the tars")
    parser.add_argument("--check", action="store_true", help="measure the tars instead of building them")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.out)
    elif arguments.source is None:
        parser.error("the folder of the unpacked package is missing")
    else:
        build(arguments.source, arguments.out)


if __name__ == "__main__":
    main()
