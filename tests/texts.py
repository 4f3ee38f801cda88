"""Lines in many scripts and shapes, for tests of everything that handles text."""

import random
from pathlib import Path

LINES = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "It's what they'll've said: DON'T we'RE I'M he'd 'sup 'tis.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Nechť již hříšné saxofony ďáblů rozezvučí síň úděsnými tóny waltzu, tanga a quickstepu.",
    "Съешь ещё этих мягких французских булок, да выпей же чаю.",
    "Чуєш їх, доцю, га? Кумедна ж ти, прощайся без ґольфів!",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· ΐ ΰ ώ Ω K Å.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق.",
    "دَلِيلٌ ١٢٣٤٥ ۱۲۳۴۵",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה. שָׁלוֹם",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले विष्णुवतार भगवान श्रीराम। १२३",
    "আমি কাঁচ খেতে পারি। தமிழ் మొదటి ಕನ್ನಡ മലയാളം",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "我能吞下玻璃而不伤身体。天地玄黃,宇宙洪荒!",
    "いろはにほへと ちりぬるを アイウエオ ｱｲｳ 日本語テキスト",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. ㄱㄴㄷ",
    "Ngày xưa có một cô bé. Tiếng Việt rất đẹp: ế ồ ữ ặ ỹ",
    "Ağrı'da İstanbul ıIiİ ğüşöç",
    "ქართული ენა Հայերեն አማርኛ ខ្មែរ ລາວ བོད་ཡིག",
    "👩\u200d👩\u200d👧\u200d👦 🧑🏽\u200d🚀 🇨🇿🇺🇦🇯🇵 🏳️\u200d🌈 ❤️ 1️⃣ 🦚🀄",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5, o\u0308\u0323 Z\u0351\u036b\u0343a\u0323l\u034ag\u0321o\u033c",
    "ﬁne ﬂow ① ² ½ ¼ ⅷ Ⅻ ㎏ ™ … — “quoted” ‘single’",
    "x²+y³=z¼ 3.14159 1,234,567.89 0xDEADBEEF 1e-10 2026-01-31 12:34:56",
    "1 12 123 1234 12345 123456 1234567 12345678901234567890",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c->d; } // <=> && || !=\r\n\r\n",
    '{"key": ["value", null, 1.5e3], "nested": {"a": {"b": [[[]]]}}}',
    "<html><body class='x'>&amp;</body></html> <s> </s> <unk> <0x41> [INST] <|endoftext|>",
    "  leading and   inner    spaces and trailing   ",
    "tabs\t\tand\nnewlines\n\n\n\r\nmixed \t \n \u00a0\u2003\u3000\u2028\u2029\u0085 end",
    " " * 40 + "x" + " " * 7 + "\n" * 9 + "\t" * 5,
    "control \x00\x01\x02\x1b[31m\x7f\x80\x9f\ufeff\u200b\u200e\u202e end",
    "\ufffd \uffff \ue000 \U0010ffff \U000f0000",
    "▁underscore▁ Ġ Ċ ſ ' ſt 'ſ",
    "a" * 50 + "ba" * 20 + "!" * 30 + "?!" * 10 + "=" * 60 + "-" * 33,
    "ALLCAPS camelCase PascalCase snake_case kebab-case HTTPServer iPhone McDonald's",
    "https://example.org/a/b?c=d&e=f#g user@example.com C:\\path\\file.txt $100 €50 £20 ¥30 50%",
    "Ünïcödé ŁÓDŹ Ørsted Æsir straße ŉ Ǆ ǅ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈𐌰 𓀀 𠜎𠜱 ☃☂☁ ∀x∈ℝ: ⌈x⌉ ≥ x ⇒ ¬(a∧b)",
]


def english_lines(count: int) -> list[str]:
    """Real lines if the shared data folder is beside the repository, otherwise none."""
    path = Path(__file__).parents[2] / "shared" / "data" / "wikitext2_test.txt"
    if not path.is_file():
        return []
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines[:: max(1, len(lines) // count)][:count]


def mixed_lines(count: int, seed: int = 0) -> list[str]:
    """Every line of `LINES`, then random cuts of them put together."""
    random_source = random.Random(seed)
    lines = list(LINES)
    while len(lines) < count:
        parts = []
        for line in random_source.choices(LINES, k=random_source.randint(1, 4)):
            start = random_source.randint(0, len(line))
            parts.append(line[start : start + random_source.randint(1, 30)])
        lines.append(random_source.choice(["", " ", "\n", "  "]).join(parts))
    return lines[:count]
