"""Training without backpropagation between the blocks: direct feedback alignment (DFA). --backward=feedback.

Backpropagation hands a block the error that the blocks above it pass down. Here e, the gradient of the loss
by what the last block puts out [B, T, C], drives every block at once: the gradient by a lower block's output
is taken to be e B, B being a matrix that is drawn once and never learns, and nothing passes from a block to
the one below. (Lillicrap et al. 2016, Random synaptic feedback weights support error backpropagation for deep
learning; Nøkland 2016, Direct Feedback Alignment; on transformers Launay et al. 2020, DFA Scales to Modern
Deep Learning Tasks and Architectures.)

feedback: within a block gradients are backpropagated, from its output to its weights. feedback_micro: a block
is cut at three points, each of which is driven: what attention has added to, the MLP's activation, the
output.
The last block's output has the true gradient, which final norm and head backpropagate to it, so these three
learn as ever. The embeddings belong to the first block: they get what it backpropagates of the feedback by
its output (feedback_micro: by its attention).

e is taken before the vocabulary head, so that a matrix is C x C, and not V x C.
"""
import torch

from layers.ops import drop_out
from model import Block
from runtime import config, distributed
from runtime.config import BadInput


# of train.py; a run that goes on keeps them
KNOBS = ["backward", "feedback_matrix", "trained_blocks"]


def check(cfg):
    """BadInput for knobs of train.py that don't go together: those of this file, and --orthogonality."""
    driven = cfg.backward != "backprop"
    config.at_least(cfg, 0, "orthogonality")
    config.at_least(cfg, 1, "orthogonality_warmup")
    if type(cfg.trained_blocks) is int:
        config.at_least(cfg, 0, "trained_blocks")
    if cfg.lora_rank and (driven or cfg.trained_blocks != "all" or cfg.orthogonality):
        raise BadInput("Adapters stand beside weights that stay as they are: leave out --lora_rank, or "
                       "--backward, --trained_blocks and --orthogonality.")
    if cfg.feedback_matrix != "each" and not driven:
        raise BadInput(f"--feedback_matrix={cfg.feedback_matrix} is about feedback, and --backward=backprop "
                       "has none: give --backward=feedback too, or leave it out.")
    if cfg.feedback_matrix == "identity" and cfg.backward == "feedback_micro":
        raise BadInput("--feedback_matrix=identity has no form for the channels of the MLP, which are more "
                       "than the error's: give --backward=feedback, or another matrix.")
    if driven and cfg.compile_mode in distributed.CUDA_GRAPHS:
        raise BadInput(f"--compile_mode={cfg.compile_mode} compiles a step as a whole, and feedback goes "
                       "from block to block: use default or max-autotune-no-cudagraphs.")
    if driven and cfg.init_from == "resume" and config.read_saved(cfg.out_dir)["seed"] != cfg.seed:
        raise BadInput(f"The matrices of {cfg.out_dir} were drawn with another seed than --seed={cfg.seed}: "
                       "leave it out, or start from scratch.")
    if cfg.trained_blocks in ("none", 0) and (driven or cfg.orthogonality):
        raise BadInput("--backward and --orthogonality are about how blocks learn, and with "
                       "--trained_blocks=none no block does: leave one of them out.")


def attach(model, cfg):
    """Have a GPT learn as cfg says: freeze its lower blocks, and drive the others by feedback. Nothing is
    changed by --backward=backprop --trained_blocks=all."""
    n_layer = len(model.blocks)
    trained = {"all": n_layer, "none": 0, "last": 1}.get(cfg.trained_blocks, cfg.trained_blocks)
    if trained > n_layer:
        raise BadInput(f"--trained_blocks={trained} is more than the {n_layer} blocks of the model: "
                       "lower it.")
    for block in model.blocks[:n_layer - trained]:
        block.requires_grad_(False)
    if cfg.backward == "backprop":
        return
    if cfg.backward == "feedback" and trained == 1:
        raise BadInput("The top block learns from the true gradient, and no other one learns here: leave out "
                       "--backward=feedback, or train more blocks.")
    if cfg.backward == "feedback_micro":
        for block in model.blocks:
            block.__class__ = BlockInParts
    model.feedback = Feedback(model.config, cfg.backward, cfg.feedback_matrix, cfg.seed)


class BlockInParts(Block):
    """A Block that is cut behind attention and behind the MLP's activation."""

    def forward(self, x, cos, sin, attend):
        """Return what is driven, [B, T, C], [B, T, mlp_hidden] and [B, T, C]; the last is what a Block
        returns."""
        y = self.attention(self.attention_norm(x), cos, sin, attend)
        attended = x + drop_out(y, self.dropout, self.training)
        x = attended.detach()
        activated = self.mlp.activation(self.mlp_norm(x))
        y = self.mlp.down(activated.detach())
        return attended, activated, x + drop_out(y, self.dropout, self.training)


class Feedback:
    """The matrices, and for each forward pass a Pass. Every rank, and a run that goes on, draws the same
    ones: they are a function of the seed."""

    def __init__(self, shape, backward, matrix, seed):
        """shape: GPTConfig. backward, matrix, seed: the knobs backward, feedback_matrix and seed."""
        C = shape.n_embd
        self.n_layer = shape.n_layer
        self.channels = C
        self.widths = [C] if backward == "feedback" else [C, shape.mlp_hidden, C]        # of a block's points
        self.matrix = matrix
        self.seed = seed
        self.drawn = None                    # see matrices

    def matrices(self, device):
        """Return for each block those of its points, fp32 [C, channels of the point]. None stands for the
        error as it is: that of the last block's output, and of every one with feedback_matrix=identity."""
        if self.matrix == "identity":
            return [[None]] * self.n_layer
        if self.drawn is None:
            generator = torch.Generator().manual_seed(self.seed)
            latest = {}                      # by width
            self.drawn = []
            for _ in range(self.n_layer):
                of_block = []
                for width in self.widths:
                    if self.matrix == "each" or width not in latest:
                        latest[width] = self.draw(width, generator).to(device)
                    of_block.append(latest[width])
                self.drawn.append(of_block)
            self.drawn[-1][-1] = None
        return self.drawn

    def draw(self, width, generator):
        """Return a matrix fp32 [C, width] that leaves the length of an error as it is, on average."""
        return torch.randn(self.channels, width, generator=generator) * width**-0.5

    def bytes_to_come(self):
        """Return what the matrices will take, 0 once they are drawn."""
        if self.drawn or self.matrix == "identity":
            return 0
        widths = set(self.widths) if self.matrix == "shared" else self.widths * self.n_layer
        top = 0 if self.matrix == "shared" else self.channels
        return 4 * self.channels * (sum(widths) - top)

    def flops_per_token(self):
        """Return the FLOPs that are added to backpropagation's: those of the products with the matrices. The
        product with an activation's stands for what the MLP's second layer would have handed down."""
        points = self.n_layer * min(2, len(self.widths)) - 1
        return 0 if self.matrix == "identity" else 2 * self.channels**2 * points

    def start(self, model):
        """Return the Pass of a forward pass that begins."""
        return Pass(self, distributed.is_spread(model))


class Pass:
    """A forward pass: GPT.hidden calls it with what each block returns, and gives the next one what it
    returns.

    The wire is how autograd brings the error at the top to the lower blocks, one after another: an output
    without memory that each block's Driven has beside the block's, and that is an input of the next one's.
    """

    def __init__(self, feedback, is_spread):
        self.feedback = feedback
        self.is_spread = is_spread
        self.block = 0                       # the next one's number
        self.wire = None

    def __call__(self, points):
        """Return what the next block reads of what a block puts out: [B, T, C], or a tuple at whose end that
        is."""
        points = points if isinstance(points, tuple) else (points,)
        if not torch.is_grad_enabled():
            return points[-1]
        matrices = self.feedback.matrices(points[-1].device)[self.block]
        self.block += 1
        is_top = self.block == self.feedback.n_layer
        h, self.wire = Driven.apply(matrices, is_top, self.wire, *points)
        # A sharded block is let go of when the gradient of its input is there, which Driven then ignores.
        return h if is_top or self.is_spread else h.detach()


class Driven(torch.autograd.Function):
    """Passes a block's output on, and gives the block the error at the top through its matrices."""

    @staticmethod
    def forward(ctx, matrices, is_top, wire, *points):
        """Return (the last of the points, the wire for the block above)."""
        ctx.set_materialize_grads(False)
        ctx.matrices = matrices
        ctx.is_top = is_top
        ctx.dtypes = [point.dtype for point in points]
        output = points[-1]
        return output.view_as(output), output.new_zeros(()).expand_as(output)

    @staticmethod
    def backward(ctx, from_above, error):
        if ctx.is_top:
            error = from_above
        gradients = []
        with torch.autocast(error.device.type, enabled=False):
            for matrix, dtype, wanted in zip(ctx.matrices, ctx.dtypes, ctx.needs_input_grad[3:]):
                if matrix is None or not wanted:                   # a frozen block wants none
                    gradients.append(error if wanted else None)
                else:
                    gradients.append((error.float() @ matrix).to(dtype))
        return None, None, error if ctx.needs_input_grad[2] else None, *gradients
