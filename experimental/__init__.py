"""Options from papers. A stage calls these functions in one line each; a file is loaded only if the run's
options ask for it."""

# Options of train.py that a resumed run keeps
FEEDBACK = ["backward", "feedback_matrix", "trained_blocks"]


def uses_feedback(cfg):
    return any(getattr(cfg, option) != getattr(type(cfg), option) for option in [*FEEDBACK, "orthogonality"])


def check(cfg):
    """Raise BadInput for conflicts of train.py's options --backward, --trained_blocks and --orthogonality."""
    if uses_feedback(cfg):
        from experimental import feedback
        feedback.check(cfg)


def attach(model, cfg):
    """Freeze blocks of a GPT and set up feedback alignment, as train.py's options ask."""
    if uses_feedback(cfg):
        from experimental import feedback
        feedback.attach(model, cfg)


def add_gradients(cfg, run):
    """Add the gradients of --orthogonality to those of the loss; return its metrics, {name: number}."""
    if not cfg.orthogonality:
        return {}
    from experimental import orthogonality
    return orthogonality.add_gradients(cfg, run)


def find_teacher(cfg, resuming, tokenizer, vocab_size, positions):
    """Return the ModelSource of --teacher, None without one. tokenizer, vocab_size, positions: the student's.
    BadInput for a teacher that does not suit it, or that has changed since a resumed run began."""
    if not cfg.teacher:
        return None
    from experimental import distillation
    source = distillation.find_teacher(cfg, resuming)
    distillation.check_teacher(source, tokenizer, vocab_size, positions)
    return source


def teacher_of(cfg, hw, source):
    """Return the Teacher of train.py, None without a ModelSource."""
    if source is None:
        return None
    from experimental.distillation import Teacher
    return Teacher(cfg, hw, source)


def pcgrad_of(cfg, run, stream):
    """Return the PCGrad of grpo.py for --surgery=pcgrad and questions of several domains, else None."""
    if cfg.surgery != "pcgrad" or len(stream.domains) == 1:
        return None
    from experimental.pcgrad import PCGrad
    return PCGrad(cfg, run, stream)
