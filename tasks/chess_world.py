"""Chess with two kinds of prompt: to be the environment, and to choose a move. The argument is A or P (default: half of each).

A: the environment. A document is one line, the question all that is before the new position:
    A: FEN+MOVE+HISTORY+NEWFEN+REWARD+TERMINATED+TRUNCATED
HISTORY is the last four moves, separated by spaces, MOVE the last of them. REWARD is 0.001 for a legal move after which the game goes
on, 1.0 for checkmate, 0.5 for a draw (stalemate, too little material, fifty moves; repetition is not in a FEN, and does not count), and
-1.0 for an illegal move, which leaves the FEN as it was. TERMINATED is 1 after the last three; TRUNCATED is 1 if the game goes on but
has come to a hundred plies, by the FEN's own count. One move in twenty is illegal.

P: the policy. One line, the question all that is before " M:":
    P: FEN M: FIVE MOVES  E: THEIR EVALUATIONS  B: THE BEST OF THEM
The best five moves (all, where there are fewer) in alphabetical order, so that the best has to be found; evaluations in pawns for the
side to move, from -9.99 to 9.99, and 10.00 or -10.00 for mate. They are Stockfish's, of all moves at depth 6, if a program of that name
is on the PATH, else those of a small search here, two plies deep: what P asks for differs between machines with and without it.

Positions are from games of random moves and from games in which three moves of four are greedy. Moves are in UCI. A FEN names an en
passant square only where the capture is legal. Needs the packages chess and rapidfuzz.
"""
import contextlib
import random
import re
import shutil
from itertools import islice
from statistics import fmean

from runtime.progress import track
from runtime.usage import load_package
from tasks import _questions

try:
    chess = load_package("chess")
    Levenshtein = load_package("rapidfuzz.distance").Levenshtein
    problem = None
except ImportError as e:             # check() says so
    problem = str(e)

PROMPT, STOP = "{}", "\n"
INSTRUCTION = ("A line that begins with A: holds a chess position, a move and the last moves; answer with the new position, the reward "
               "and two flags, separated by +. A line that begins with P: holds a position; answer with M: five moves, E: their "
               "evaluations and B: the best of them. Answer with that one line alone.")
HISTORY = 4                          # moves, the one to be made included
LONGEST_GAME = 100                   # plies
ILLEGAL = 0.05                       # share of the questions of A
GREEDY = 0.75                        # share of greedy moves in half of the games
KEPT = {"train": 1 / 8, "valid": 1.0, "test": 1.0}          # share of a split's positions that are used: about ten a game of each
GAMES = 32                           # games whose positions are mixed, so that neighbours in a text tell nothing of each other
SLOW = 4                             # with P there are so many times fewer documents: a position takes 8 ms, with Stockfish 60
STOCKFISH_DEPTH = 6
CANDIDATES = 5
MATE, MOST = 10.0, 9.99              # pawns
LONGEST_TEXT = 400                   # characters of a completion that are read; honest ones have at most 130

UCI, PAWNS = "[a-h][1-8][a-h][1-8][nbrq]?", r"-?[0-9]{1,2}\.[0-9]{2}"
STEP = re.compile(r"([^+]{1,100})\+(-?[0-9]\.[0-9]{1,3})\+([01])\+([01])")
POLICY = re.compile(rf"M:((?: {UCI}){{1,{CANDIDATES}}})  E:((?: {PAWNS}){{1,{CANDIDATES}}})  B: ({UCI})")
NEAR = 0.5                           # pawns that evaluations may be off, on average, and count as right
BEST = 0.05                          # pawns that the chosen move may be worse than the best
BLIND_FLAGS = "0.001", "0", "0"      # of most moves: what can be said without looking
LOST = 3.0                           # pawns more than that, and evaluations or the chosen move earn nothing


def check(argument):
    if argument not in (None, "A", "P"):
        raise ValueError(f"The argument of chess_world is A, the environment, or P, the policy, and {argument or 'nothing'} was given.")
    if problem:
        raise ValueError(f"The task chess_world needs chess and rapidfuzz, and {problem}.")


# --- the environment ---

def verdict(board):
    """The reward of the move that led here if the game ends with it, else None."""
    if not any(board.generate_legal_moves()):
        return 1.0 if board.is_check() else 0.5
    return 0.5 if board.halfmove_clock >= 100 or board.is_insufficient_material() else None


def step(fen, move):
    """What the environment answers to a move."""
    board, move = chess.Board(fen), chess.Move.from_uci(move)
    if not board.is_legal(move):
        return f"{fen}+-1.0+1+0"
    board.push(move)
    reward = verdict(board)
    ended = reward is not None
    return f"{board.fen()}+{reward if ended else 0.001}+{ended:d}+{not ended and board.ply() >= LONGEST_GAME:d}"


# --- evaluations ---

VALUES = 0, 1.0, 3.2, 3.3, 5.0, 9.5, 0               # of pawn, knight, bishop, rook, queen, king: the package's numbers 1 to 6
CENTRAL = 0, 0, 0.06, 0.03, 0.01, 0.01, -0.06        # pawns for each step from the edge, by file and by rank


def worth(piece, file, rank):
    """Pawns that a piece is worth where it stands, ranks counted from its own side."""
    if piece == 1:
        return 1 + 0.03 * (rank - 1) * (1 + min(file, 7 - file))
    return VALUES[piece] + CENTRAL[piece] * (min(file, 7 - file) + min(rank, 7 - rank))


# [black, white][piece][square], squares from a1 to h8
WORTH = [[[worth(piece, square % 8, square // 8 if white else 7 - square // 8) for square in range(64)] for piece in range(7)]
         for white in (False, True)]


def balance(board):
    """Pawns that who moves is ahead."""
    white = sum(WORTH[p.color][p.piece_type][square] * (1 if p.color else -1) for square, p in board.piece_map().items())
    return white if board.turn else -white


def change(board, move):
    """Pawns that who moves gains at once."""
    mine, theirs, piece = WORTH[board.turn], WORTH[not board.turn], board.piece_type_at(move.from_square)
    taken = board.piece_type_at(move.to_square)
    gained = mine[move.promotion or piece][move.to_square] - mine[piece][move.from_square]
    if taken:
        return gained + theirs[taken][move.to_square]
    return gained + (piece == 1 and (move.to_square - move.from_square) % 8 > 0)         # a pawn, en passant


def gain(board, move):
    """The same without the piece that moves, if the square is guarded: a search of one ply that does not take pawns with queens."""
    gained = change(board, move)
    if board.attackers_mask(not board.turn, move.to_square):
        gained -= VALUES[move.promotion or board.piece_type_at(move.from_square)]
    return gained


def search(board):
    """{move: pawns for who moves} of all legal moves: what a move changes, less the most that an answer to it gains. An answer
    that mates is not seen."""
    found, now = {}, balance(board)
    for move in list(board.legal_moves):
        pawns = now + change(board, move)
        board.push(move)
        ended = verdict(board)
        if ended is None:
            pawns -= max(gain(board, reply) for reply in board.legal_moves)
        found[move.uci()] = MATE if ended == 1.0 else 0.0 if ended else round(max(-MOST, min(MOST, pawns)), 2)
        board.pop()
    return found


@contextlib.contextmanager
def analyst():
    """A function of a board with {move: pawns for who moves} of all legal moves: Stockfish's evaluations, which are the same each time
    at a fixed depth, one thread and an empty table, or without it those of `search`."""
    path = shutil.which("stockfish")
    if path is None:
        yield search
        return
    import chess.engine                  # not above: workers start without it

    def analyse(board):
        # Another game each time: Stockfish forgets what it has seen.
        lines = engine.analyse(board, chess.engine.Limit(depth=STOCKFISH_DEPTH), game=object(), multipv=board.legal_moves.count())
        return {line["pv"][0].uci(): pawns(line["score"].pov(board.turn)) for line in lines}
    try:
        with chess.engine.SimpleEngine.popen_uci(path) as engine:
            engine.configure({"Threads": 1, "Hash": 1})
            yield analyse
    except (chess.engine.EngineError, OSError) as e:
        raise ValueError(f"{path} fails ({type(e).__name__}: {e}): mend it, or take it off the PATH.") from e


def pawns(score):
    if score.is_mate():
        return MATE if score > chess.engine.Cp(0) else -MATE
    return max(-MOST, min(MOST, score.score() / 100))


# --- questions ---

def game(rng):
    """[(FEN, moves before, move)] of a game."""
    board, greedy, rows = chess.Board(), rng.choice((0.0, GREEDY)), []
    while board.ply() < LONGEST_GAME and verdict(board) is None:
        moves = list(board.legal_moves)
        move = max(moves, key=lambda move: gain(board, move)) if rng.random() < greedy else rng.choice(moves)
        rows.append((board.fen(), [m.uci() for m in board.move_stack[max(0, len(rows) + 1 - HISTORY):]], move.uci()))
        board.push(move)
    return rows


def position_of(fen):
    """What makes a position: placement, side to move, castling and en passant, not the counters."""
    return " ".join(fen.split()[:4])


def positions(split, rng):
    """(FEN, moves before, move) of different positions of a split, without end. A game's last is used whenever it is of the split: of
    train, which leaves most others out, it makes 7% instead of 1%, and mates and draws are rare enough."""
    seen = set()
    while True:
        found = []
        for rows in (game(rng) for _ in range(GAMES)):
            for i, row in enumerate(rows, 1):
                asked = position_of(row[0])
                if _questions.split_of(asked) == split and (i == len(rows) or rng.random() < KEPT[split]) and asked not in seen:
                    seen.add(asked)
                    found.append(row)
        rng.shuffle(found)
        yield from found


def illegal(fen, rng):
    """A move that can't be made, in three cases of four one of a piece of who moves."""
    board, mine = chess.Board(fen), rng.random() < 0.75
    while True:
        frm = rng.choice(list(chess.SquareSet(board.occupied_co[board.turn]))) if mine else rng.randrange(64)
        move = chess.Move(frm, rng.randrange(64))
        if frm != move.to_square and not board.is_legal(move):
            return move.uci()


def drawn(split, seed, n, argument):
    """n questions about as many positions."""
    rng = random.Random(f"{seed} {split} chess")
    found = track(islice(positions(split, rng), n), f"playing chess for {split}", "positions", n)
    with analyst() if argument != "A" else contextlib.nullcontext() as evaluate:
        for i, (fen, before, move) in enumerate(found):
            if (argument or "AP"[i % 2]) == "P":
                evaluations = evaluate(chess.Board(fen))
                yield {"question": f"P: {fen}", "answer": policy(evaluations), "kind": "P", "fen": fen, "evaluations": evaluations}
                continue
            if rng.random() < ILLEGAL:
                move = illegal(fen, rng)
            yield {"question": f"A: {fen}+{move}+{' '.join([*before, move])}+", "answer": step(fen, move), "kind": "A", "fen": fen,
                   "move": move}


def policy(evaluations):
    """The answer that {move: pawns} makes."""
    best = sorted(evaluations, key=lambda move: (-evaluations[move], move))[:CANDIDATES]
    return f"M: {' '.join(sorted(best))}  E: {' '.join(f'{evaluations[move]:.2f}' for move in sorted(best))}  B: {best[0]}"


def questions(split, seed=0, n=None, argument=None):
    return list(drawn(split, f"{seed} questions", _questions.N_QUESTIONS if n is None else n, argument))


def solution(question):
    return f"{' ' if question['kind'] == 'P' else ''}{question['answer']}{STOP}"


def documents(split, seed=0, argument=None):
    n = _questions.N_DOCUMENTS[split] // (1 if argument == "A" else SLOW)
    return [q["question"] + solution(q) for q in drawn(split, seed, n, argument)]


def examples(n, argument=None):
    return [(q["question"], solution(q)) for q in drawn("train", "examples", n, argument)]


# --- the verifier ---

def reward(question, completion):
    """Return (score, parts); the score is 1.0 if and only if all parts are true. An answer that has not the form gets nothing,
    and neither does what can be said without looking at the position: partial credit is counted from there, see `beyond`.

    A: 0.05 for the form, up to 0.35 for a FEN nearer to the right one (by edits) than all of `blind_fens`,
    0.4 for the right one, 0.2 for reward and flags, a third each, in an answer whose position is possible at
    all. Parts: formatted, legal_fen, fen, flags.
    P: 0.05 for the form, up to 0.15 for legal moves, 0.3 for their evaluations, 0.5 for a choice among them, as good as the best.
    Parts: formatted, legal (all, no two the same, the choice among them), evaluations (off by NEAR at most, on average), best.
    """
    text = completion[:LONGEST_TEXT].partition(STOP)[0].strip()
    return (grade_step if question["kind"] == "A" else grade_policy)(question, text)


def beyond(points, blind):
    """Return the score of an answer with so many points of 1: how far it is from those of an answer that does not look at the
    position (blind) toward 1, at most 0.99."""
    return min(0.99, max(0.0, points - blind) / (1 - blind))


def grade_step(question, text):
    parts, found = dict.fromkeys(("formatted", "legal_fen", "fen", "flags"), False), STEP.fullmatch(text)
    right, *truth = question["answer"].split("+")
    if not found:
        return 0.0, parts
    fen, *flags = found.groups()
    parts |= {"formatted": True, "legal_fen": possible(fen), "fen": fen == right, "flags": flags == truth}
    if all(parts.values()):
        return 1.0, parts
    unseen = blind_fens(question["fen"])
    blind = max(step_points(guess, BLIND_FLAGS, unseen, right, truth) for guess in unseen)
    return beyond(step_points(fen, flags, unseen, right, truth), blind), parts


def blind_fens(fen):
    """Return the FENs that can be written without looking at the board: the old one, and two in which it is
    the other side's turn and the counters have moved on, the halfmoves by one or back to 0."""
    board, side, castling, _, halfmoves, moves = fen.split()
    side, moves = ("b", moves) if side == "w" else ("w", int(moves) + 1)
    return [fen, *(f"{board} {side} {castling} - {clock} {moves}" for clock in (int(halfmoves) + 1, 0))]


def step_points(fen, flags, unseen, right, truth):
    # 1.0 after an illegal move: nothing is nearer.
    copied = max(Levenshtein.normalized_similarity(guess, right) for guess in unseen)
    nearer = (Levenshtein.normalized_similarity(fen, right) - copied) / (1 - copied) if copied < 1 else fen == right
    same = fmean(a == b for a, b in zip(flags, truth)) if possible(fen) else 0
    return 0.05 + 0.35 * max(0.0, nearer) + 0.4 * (fen == right) + 0.2 * same


def possible(fen):
    """Whether a text is the FEN of a position that a game may come to."""
    try:
        return chess.Board(fen).is_valid()
    except ValueError:
        return False


def grade_policy(question, text):
    parts, found = dict.fromkeys(("formatted", "legal", "evaluations", "best"), False), POLICY.fullmatch(text)
    if not found:
        return 0.0, parts
    moves, evaluations, choice = found[1].split(), [float(x) for x in found[2].split()], found[3]
    truth = question["evaluations"]
    wanted = min(CANDIDATES, len(truth))
    if not len(moves) == len(evaluations) == wanted:
        return 0.0, parts
    off = {move: abs(pawns - truth[move]) for move, pawns in zip(moves, evaluations) if move in truth}
    error = fmean([*off.values(), *[LOST + NEAR] * (wanted - len(off))])
    highest = max(truth.values())
    regret = highest - (truth[choice] if choice in off else -MATE - LOST)
    parts = {"formatted": True, "legal": len(off) == wanted and choice in off, "evaluations": error <= NEAR, "best": regret <= BEST}
    if all(parts.values()):
        return 1.0, parts
    any_move = fmean(graded(highest - pawns - BEST) for pawns in truth.values())
    blind = policy_points(1.0, fmean(map(abs, truth.values())), any_move)              # any legal moves, all of them at 0.00
    return beyond(policy_points(len(off) / wanted, error, graded(regret - BEST)), blind), parts


def policy_points(legal, error, choice):
    return 0.05 + 0.15 * legal + 0.3 * graded(error - NEAR) + 0.5 * choice


def graded(pawns):
    """1 for nothing lost, 0 for LOST pawns and more."""
    return 1 - min(1.0, max(0.0, pawns / LOST))


def signature(completion):
    """The answer; of P, its moves and its choice, whatever their evaluations."""
    return " ".join(re.sub(r" E:.*? B:", " B:", completion[:LONGEST_TEXT].partition(STOP)[0]).split())
