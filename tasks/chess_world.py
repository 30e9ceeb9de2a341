"""Chess with two kinds of prompt: predict the environment, and choose a move. The argument is A or P
(default: half each).

A, the environment. A document is one line; the question is the part before the new position:
    A: FEN+MOVE+HISTORY+NEWFEN+REWARD+TERMINATED+TRUNCATED
HISTORY is the last four moves, separated by spaces, ending with MOVE. REWARD is 0.001 for a legal move that
does not end the game, 1.0 for checkmate, 0.5 for a draw (stalemate, insufficient material, fifty moves; not
repetition, which a FEN does not contain), and -1.0 for an illegal move, which does not change the FEN.
TERMINATED is 1 for the last three; TRUNCATED is 1 if the game continues at a hundred plies by the FEN's
count. One move in twenty is illegal.

P, the policy. One line; the question is the part before " M:":
    P: FEN M: FIVE MOVES  E: THEIR EVALUATIONS  B: THE BEST OF THEM
The best five moves (or all, if fewer) are in alphabetical order, which hides the best. Evaluations are in
pawns for the side to move, -9.99 to 9.99, and 10.00 or -10.00 for mate. They come from Stockfish at depth 6
if it is on the PATH, else from the two-ply search in this file, so the answers of P differ between machines
with and without Stockfish.

Positions come from games of random moves and games with three in four moves greedy. Moves are in UCI
notation. A FEN names an en passant square only if the capture is legal. Requires the packages chess and
rapidfuzz."""
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
except ImportError as e:             # reported by check()
    problem = str(e)

PROMPT = "{}"
STOP = "\n"
INSTRUCTION = ("A line that begins with A: holds a chess position, a move and the last moves; answer with "
               "the new position, the reward and two flags, separated by +. A line that begins with P: "
               "holds a position; answer with M: five moves, E: their evaluations and B: the best of them. "
               "Answer with that one line alone.")
HISTORY = 4                          # moves, including the current one
LONGEST_GAME = 100                   # plies
ILLEGAL = 0.05                       # share of illegal moves in A
GREEDY = 0.75                        # share of greedy moves in half of the games
KEPT = {"train": 1 / 8, "valid": 1.0, "test": 1.0}       # share of positions used: about ten a game and split
GAMES = 32                           # games whose positions are shuffled together, to decorrelate neighbours
SLOW = 4                        # divisor of the number of documents for P: 8 ms a position, 60 with Stockfish
STOCKFISH_DEPTH = 6
CANDIDATES = 5
MATE = 10.0                          # pawns
MOST = 9.99
LONGEST_TEXT = 400                   # characters read of a completion; honest ones have at most 130

UCI = "[a-h][1-8][a-h][1-8][nbrq]?"
PAWNS = r"-?[0-9]{1,2}\.[0-9]{2}"
STEP = re.compile(r"([^+]{1,100})\+(-?[0-9]\.[0-9]{1,3})\+([01])\+([01])")
POLICY = re.compile(rf"M:((?: {UCI}){{1,{CANDIDATES}}})  E:((?: {PAWNS}){{1,{CANDIDATES}}})  B: ({UCI})")
NEAR = 0.5                           # mean error in pawns of evaluations that count as right
BEST = 0.05                          # pawns by which the chosen move may be worse than the best
BLIND_FLAGS = "0.001", "0", "0"      # most frequent reward and flags
LOST = 3.0                        # excess error in pawns at which evaluations or the chosen move earn nothing


def check(argument):
    if argument not in (None, "A", "P"):
        raise ValueError("The argument of chess_world is A, the environment, or P, the policy, and "
                         f"{argument or 'nothing'} was given.")
    if problem:
        raise ValueError(f"The task chess_world needs chess and rapidfuzz, and {problem}.")


# --- the environment ---

def verdict(board):
    """Return the reward of the last move if it ended the game, else None."""
    if not any(board.generate_legal_moves()):
        return 1.0 if board.is_check() else 0.5
    return 0.5 if board.halfmove_clock >= 100 or board.is_insufficient_material() else None


def step(fen, move):
    """Return the environment's response to a move."""
    board = chess.Board(fen)
    move = chess.Move.from_uci(move)
    if not board.is_legal(move):
        return f"{fen}+-1.0+1+0"
    board.push(move)
    reward = verdict(board)
    ended = reward is not None
    truncated = not ended and board.ply() >= LONGEST_GAME
    return f"{board.fen()}+{reward if ended else 0.001}+{ended:d}+{truncated:d}"


# --- evaluations ---

VALUES = 0, 1.0, 3.2, 3.3, 5.0, 9.5, 0        # by piece type: pawn (1), knight, bishop, rook, queen, king (6)
CENTRAL = 0, 0, 0.06, 0.03, 0.01, 0.01, -0.06        # pawns per step from the edge, by file and by rank


def worth(piece, file, rank):
    """Return the value in pawns of a piece on a square; ranks count from its own side."""
    if piece == 1:
        return 1 + 0.03 * (rank - 1) * (1 + min(file, 7 - file))
    return VALUES[piece] + CENTRAL[piece] * (min(file, 7 - file) + min(rank, 7 - rank))


# [black, white][piece][square], squares from a1 to h8
WORTH = [[[worth(piece, square % 8, square // 8 if white else 7 - square // 8) for square in range(64)]
          for piece in range(7)] for white in (False, True)]


def balance(board):
    """Return the material balance in pawns for the side to move."""
    white = sum(WORTH[p.color][p.piece_type][square] * (1 if p.color else -1)
                for square, p in board.piece_map().items())
    return white if board.turn else -white


def change(board, move):
    """Return the immediate gain in pawns of a move."""
    mine = WORTH[board.turn]
    theirs = WORTH[not board.turn]
    piece = board.piece_type_at(move.from_square)
    taken = board.piece_type_at(move.to_square)
    gained = mine[move.promotion or piece][move.to_square] - mine[piece][move.from_square]
    if taken:
        return gained + theirs[taken][move.to_square]
    return gained + (piece == 1 and (move.to_square - move.from_square) % 8 > 0)         # en passant


def gain(board, move):
    """Return `change` minus the moving piece if the target square is guarded: a one-ply search that does not
    take guarded pawns with queens."""
    gained = change(board, move)
    if board.attackers_mask(not board.turn, move.to_square):
        gained -= VALUES[move.promotion or board.piece_type_at(move.from_square)]
    return gained


def search(board):
    """Return {move: pawns for the side to move} of all legal moves: the change by the move minus the largest
    gain of a reply. Mating replies are not seen."""
    found = {}
    now = balance(board)
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
    """Yield a function from a board to {move: pawns for the side to move} of all legal moves: Stockfish's
    evaluations, deterministic by a fixed depth, one thread and an empty table, or `search` without
    Stockfish."""
    path = shutil.which("stockfish")
    if path is None:
        yield search
        return
    import chess.engine                  # here, so that workers start without it

    def analyse(board):
        # A new game each time clears Stockfish's table.
        limit = chess.engine.Limit(depth=STOCKFISH_DEPTH)
        lines = engine.analyse(board, limit, game=object(), multipv=board.legal_moves.count())
        return {line["pv"][0].uci(): pawns(line["score"].pov(board.turn)) for line in lines}
    try:
        with chess.engine.SimpleEngine.popen_uci(path) as engine:
            engine.configure({"Threads": 1, "Hash": 1})
            yield analyse
    except (chess.engine.EngineError, OSError) as e:
        raise ValueError(f"{path} fails ({type(e).__name__}: {e}): repair it, or take it off the "
                         "PATH.") from e


def pawns(score):
    if score.is_mate():
        return MATE if score > chess.engine.Cp(0) else -MATE
    return max(-MOST, min(MOST, score.score() / 100))


# --- questions ---

def game(rng):
    """Return [(FEN, previous moves, move)] of a game."""
    board = chess.Board()
    greedy = rng.choice((0.0, GREEDY))
    rows = []
    while board.ply() < LONGEST_GAME and verdict(board) is None:
        moves = list(board.legal_moves)
        move = max(moves, key=lambda move: gain(board, move)) if rng.random() < greedy else rng.choice(moves)
        previous = board.move_stack[max(0, len(rows) + 1 - HISTORY):]
        rows.append((board.fen(), [m.uci() for m in previous], move.uci()))
        board.push(move)
    return rows


def position_of(fen):
    """Return a FEN's placement, side to move, castling and en passant, without the counters."""
    return " ".join(fen.split()[:4])


def positions(split, rng):
    """Yield (FEN, previous moves, move) of distinct positions of a split, endlessly. A game's last position
    is always kept: then 7% instead of 1% of the train positions end a game, since KEPT drops most others."""
    seen = set()
    while True:
        found = []
        for rows in (game(rng) for _ in range(GAMES)):
            for i, row in enumerate(rows, 1):
                key = position_of(row[0])
                if _questions.split_of(key) != split:
                    continue
                if (i == len(rows) or rng.random() < KEPT[split]) and key not in seen:
                    seen.add(key)
                    found.append(row)
        rng.shuffle(found)
        yield from found


def illegal(fen, rng):
    """Return an illegal move, in three cases of four of a piece of the side to move."""
    board = chess.Board(fen)
    mine = rng.random() < 0.75
    while True:
        frm = rng.choice(list(chess.SquareSet(board.occupied_co[board.turn]))) if mine else rng.randrange(64)
        move = chess.Move(frm, rng.randrange(64))
        if frm != move.to_square and not board.is_legal(move):
            return move.uci()


def drawn(split, seed, n, argument):
    """Yield n questions about distinct positions."""
    rng = random.Random(f"{seed} {split} chess")
    found = track(islice(positions(split, rng), n), f"playing chess for {split}", "positions", n)
    with analyst() if argument != "A" else contextlib.nullcontext() as evaluate:
        for i, (fen, before, move) in enumerate(found):
            if (argument or "AP"[i % 2]) == "P":
                evaluations = evaluate(chess.Board(fen))
                yield {"question": f"P: {fen}", "answer": policy(evaluations), "kind": "P", "fen": fen,
                       "evaluations": evaluations}
                continue
            if rng.random() < ILLEGAL:
                move = illegal(fen, rng)
            yield {"question": f"A: {fen}+{move}+{' '.join([*before, move])}+", "answer": step(fen, move),
                   "kind": "A", "fen": fen, "move": move}


def policy(evaluations):
    """Return the answer of P for {move: pawns}."""
    best = sorted(evaluations, key=lambda move: (-evaluations[move], move))[:CANDIDATES]
    pawns_of_best = [f"{evaluations[move]:.2f}" for move in sorted(best)]
    return f"M: {' '.join(sorted(best))}  E: {' '.join(pawns_of_best)}  B: {best[0]}"


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
    """Return (score, parts); the score is 1.0 if and only if all parts are true. A malformed answer scores 0,
    as does one that does not depend on the position: partial credit is measured from there, see `beyond`.

    A: 0.05 for the format, up to 0.35 for a FEN nearer to the right one (by edit distance) than all of
    `blind_fens`, 0.4 for the right FEN, 0.2 for reward and flags, a third each, if the FEN is a valid
    position. Parts: formatted, legal_fen, fen, flags. P: 0.05 for the format, up to 0.15 for legal moves, 0.3
    for their evaluations, 0.5 for a choice as good as the best. Parts: formatted, legal (all moves legal and
    distinct, the choice among them), evaluations (mean error at most NEAR), best."""
    text = completion[:LONGEST_TEXT].partition(STOP)[0].strip()
    return (grade_step if question["kind"] == "A" else grade_policy)(question, text)


def beyond(points, blind):
    """Return the score for `points` of 1, where `blind` points score 0; at most 0.99."""
    if blind >= 1:                           # the position decides nothing
        return 0.0
    return min(0.99, max(0.0, points - blind) / (1 - blind))


def grade_step(question, text):
    parts = dict.fromkeys(("formatted", "legal_fen", "fen", "flags"), False)
    found = STEP.fullmatch(text)
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
    """Return the FENs that need no look at the board: the old one, and two with the other side to move and
    updated counters, halfmoves incremented or reset to 0."""
    board, side, castling, _, halfmoves, moves = fen.split()
    side, moves = ("b", moves) if side == "w" else ("w", int(moves) + 1)
    return [fen, *(f"{board} {side} {castling} - {clock} {moves}" for clock in (int(halfmoves) + 1, 0))]


def step_points(fen, flags, unseen, right, truth):
    # copied is 1.0 after an illegal move
    copied = max(Levenshtein.normalized_similarity(guess, right) for guess in unseen)
    nearer = fen == right
    if copied < 1:
        nearer = (Levenshtein.normalized_similarity(fen, right) - copied) / (1 - copied)
    same = fmean(a == b for a, b in zip(flags, truth)) if possible(fen) else 0
    return 0.05 + 0.35 * max(0.0, nearer) + 0.4 * (fen == right) + 0.2 * same


def possible(fen):
    """Return whether a text is the FEN of a valid position."""
    try:
        return chess.Board(fen).is_valid()
    except ValueError:
        return False


def grade_policy(question, text):
    parts = dict.fromkeys(("formatted", "legal", "evaluations", "best"), False)
    found = POLICY.fullmatch(text)
    if not found:
        return 0.0, parts
    moves = found[1].split()
    evaluations = [float(x) for x in found[2].split()]
    choice = found[3]
    truth = question["evaluations"]
    wanted = min(CANDIDATES, len(truth))
    if not len(moves) == len(evaluations) == wanted:
        return 0.0, parts
    off = {move: abs(pawns - truth[move]) for move, pawns in zip(moves, evaluations) if move in truth}
    error = fmean([*off.values(), *[LOST + NEAR] * (wanted - len(off))])
    highest = max(truth.values())
    regret = highest - (truth[choice] if choice in off else -MATE - LOST)
    parts = {"formatted": True, "legal": len(off) == wanted and choice in off,
             "evaluations": error <= NEAR, "best": regret <= BEST}
    if all(parts.values()):
        return 1.0, parts
    any_move = fmean(graded(highest - pawns - BEST) for pawns in truth.values())
    # any legal moves, all of them at 0.00
    blind = policy_points(1.0, fmean(map(abs, truth.values())), any_move)
    return beyond(policy_points(len(off) / wanted, error, graded(regret - BEST)), blind), parts


def policy_points(legal, error, choice):
    return 0.05 + 0.15 * legal + 0.3 * graded(error - NEAR) + 0.5 * choice


def graded(pawns):
    """Return 1 for no loss, falling linearly to 0 at LOST pawns."""
    return 1 - min(1.0, max(0.0, pawns / LOST))


def signature(completion):
    """Return the answer, for P without the evaluations."""
    return " ".join(re.sub(r" E:.*? B:", " B:", completion[:LONGEST_TEXT].partition(STOP)[0]).split())
