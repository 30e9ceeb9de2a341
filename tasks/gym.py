"""Questions of the library reasoning-gym (pip install reasoning-gym): `gym:NAME` is a generator or a group of
generators (math, code, logic, simulation). Nothing is downloaded, and no model output is executed.

Only generators whose verifiers passed an audit are included, see EXCLUDED and
docs/tasks.md. The library pays partial rewards for answers that merely contain the right one; here only
its full score counts, on the text within the first <answer></answer>. An item is a function of (generator,
index): a question carries both, and the grader generates the item again."""
import contextlib
import functools
import io
import re

from runtime.usage import load_package
from tasks import _answers, _numbers, _questions

INSTRUCTION = ("Think step by step. Then give the answer alone, in the form that is asked for, within "
               "<answer></answer>.")
ANSWER = re.compile(r"<answer ?>(.*?)</answer ?>", re.IGNORECASE | re.DOTALL)
DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?")
LONGEST = 4_000                      # characters of an answer that are read
N_ITEMS = 1_000_000                  # indices of a generator; some generators list them all

GROUPS = {
    "math": ["basic_arithmetic", "chain_sum", "decimal_chain_sum", "fraction_simplification", "gcd",
             "gsm_symbolic", "lcm", "leg_counting", "number_sequence", "prime_factorization", "products",
             "simple_equations", "simple_geometry", "time_intervals"],
    "code": ["base_conversion", "bf", "binary_alternation", "bitwise_arithmetic", "caesar_cipher",
             "count_bits", "letter_counting", "number_filtering", "number_sorting", "spell_backward",
             "word_sequence_reversal", "word_sorting"],
    "logic": ["aiw", "circuit_logic", "course_schedule", "family_relationships", "knights_knaves",
              "mini_sudoku", "syllogism"],
    "simulation": ["ab", "color_cube_rotation", "largest_island", "manipulate_matrix", "maze",
                   "rotate_matrix", "rotten_oranges", "spiral_matrix"],
}
# generators that passed the audit but are in no group: too long, hard or few questions for a small model
OTHERS = ["arc_1d", "arc_agi", "calendar_arithmetic", "count_primes", "cryptarithm", "decimal_arithmetic",
          "dice", "emoji_mystery", "figlet_font", "group_anagrams", "mahjong_puzzle", "modulo_grid",
          "needle_haystack", "path_star", "rearc", "rectangle_count", "self_reference", "sentence_reordering",
          "string_manipulation", "sudoku", "tsumego"]
# compared as text: generators with a single answer whose scorer overpays, raises or calls eval (bf: prints)
EXACT = ("bf", "knights_knaves", "number_sorting", "prime_factorization", "spiral_matrix", "time_intervals",
         "word_sorting")
# changes to the library's defaults
SETTINGS = {"manipulate_matrix": {"max_rows": 5, "max_cols": 5, "max_transforms": 3},
            "rotate_matrix": {"max_n": 5, "max_rotations": 4}, "rotten_oranges": {"min_n": 4, "max_n": 7},
            "spiral_matrix": {"max_n": 5}, "string_manipulation": {"max_num_rules": 4}}
# {generator: finding of the audit}
EXCLUDED = {name: finding for finding, names in {
    "its scorer calls eval, which executes what was said as code": "binary_matrix n_queens string_insertion",
    "its scorer calls parse_expr, which executes what was said as code":
        "countdown intermediate_integration polynomial_multiplication puzzle24 simple_integration",
    "its scorer pays a wrong answer in full, such as `left down` for `down left`":
        "advanced_geometry complex_arithmetic game_of_life_halting jugs kakurasu letter_jumble "
        "palindrome_generation polynomial_equations pool_matrix shortest_path survo",
    "its scorer raises KeyError on `{}`": "game_of_life",
    "it has no right answer of its own": "boxnet graph_color propositional_logic rubiks_cube rush_hour",
    "an item is not a function of its index: in another process it is another":
        "codeio isomorphic_strings list_functions ransom_note",
    "an item takes 0.12 to 2.5 s to make": "futoshiki knight_swap quantum_lock sokoban zebra_puzzles",
    "constructing it makes all of its items at once and takes over a minute": "acre",
    "500 items have only about 200 different questions": "coin_flip string_splitting string_synthesis",
    "it makes no more than a few items of one seed": "word_ladder",
    "its answers are too long, over 4,000 characters": "palindrome_partitioning tower_of_hanoi",
    "it is a mixture of the others: use a group": "composite",
    "its question asks for a rounded number, and its answer is not rounded": "number_format power_function",
}.items() for name in names.split()}


def check(argument):
    names = ", ".join(GROUPS)
    if not argument:
        raise ValueError("The task gym needs the name of a group or generator: gym:NAME, with one of "
                         f"{names}, or of docs/tasks.md.")
    if argument in EXCLUDED:
        raise ValueError(f"The generator {argument} is left out of gym ({EXCLUDED[argument]}): choose "
                         f"another, or one of {names}.")
    if argument not in GROUPS and not any(argument in group for group in (*GROUPS.values(), OTHERS)):
        raise ValueError(f"There is no audited generator {argument} in gym: choose {names}, or one of "
                         "docs/tasks.md.")
    library()


def library():
    """Return the module reasoning_gym, which takes seconds to import; ValueError if it is not installed."""
    try:
        return load_package("reasoning_gym", "reasoning-gym")
    except ImportError as e:
        raise ValueError(f"The task gym can't be used, since {e}.") from None


@functools.cache
def dataset(generator):
    """Return the library's generator, with a fixed seed: items depend on the index only."""
    return library().create_dataset(generator, seed=0, size=N_ITEMS, **SETTINGS.get(generator, {}))


@functools.lru_cache(1024)
def entry(generator, index):
    """Return the library's item, with the metadata of its scorer."""
    return dataset(generator)[index]


def draw(rng, argument):
    """Return (key, question) of a random generator of a group, or of the generator with this name."""
    generator = rng.choice(GROUPS.get(argument, [argument]))
    while True:
        index = rng.randrange(N_ITEMS)
        with contextlib.redirect_stdout(io.StringIO()):          # bf prints
            item = entry(generator, index)
        if item["answer"].strip():           # an empty answer would look like none
            break
    text = item["question"].strip()
    return text, {"question": text, "answer": item["answer"].strip(), "generator": generator, "index": index}


def questions(split, seed=0, n=None, argument=None):
    return _questions.distinct(lambda rng: draw(rng, argument), split, seed, n)


def solution(question):
    return f"<answer>{question['answer']}</answer>"


def documents(split, seed=0, argument=None):
    found = _questions.draw_documents(lambda rng: draw(rng, argument), split, seed)
    return [_questions.document(q, solution(q)) for q in found]


def plain(text):
    """Return a text without differences of case, spaces, quotation marks and a final full stop."""
    return re.sub(r"[\s'\"]", "", _numbers.normal(text).casefold()).removesuffix(".")


def is_right(question, answer):
    """Return whether an answer earns the library's full score. A number must also be exactly the right one,
    because some scorers round, or find a number anywhere."""
    right = question["answer"]
    if _numbers.unwrapped(right) == right:   # otherwise the wrapping may belong to the answer
        answer = _numbers.unwrapped(answer)
    if right.isalpha():                      # some scorers refuse `yes` or `Yes.` for `Yes`
        return plain(answer) == plain(right)
    exact = _numbers.number(right)
    if exact is not None and _numbers.number(answer) != exact:
        return False
    if DECIMAL.fullmatch(right) and question["generator"] != "base_conversion":
        answer = right                       # not all scorers accept 21.0 or +21
    if question["generator"] in EXACT:
        return plain(answer) == plain(right)
    item = entry(question["generator"], question["index"])
    if item["question"].strip() != question["question"]:
        raise ValueError("the installed reasoning-gym has another question at this index: install the "
                         "version that generated it")
    return dataset(question["generator"]).score_answer(answer, item) == 1.0


def reward(question, completion):
    found = _answers.find(completion, ANSWER)
    answer = found[1].strip() if found else ""
    answered = 0 < len(answer) <= LONGEST
    correct = answered and is_right(question, answer)
    return float(correct), {"answered": answered, "correct": correct}
