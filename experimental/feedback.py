"""Training without backpropagation between the blocks: direct feedback alignment (DFA). --backward=feedback.

Let e be the gradient of the loss with respect to the last block's output [B, T, C]. In DFA the gradient with
respect to the output of every lower block is e M, where M is a fixed random matrix, and no gradient flows
from one block to the block below. (Lillicrap et al. 2016, Random synaptic feedback weights support error
backpropagation for deep learning; Nøkland 2016, Direct Feedback Alignment; on transformers Launay et al.
2020, DFA Scales to Modern Deep Learning Tasks and Architectures.)

feedback: a block backpropagates the feedback at its output to its weights. feedback_micro: a block receives
feedback at three points: the residual stream after attention, the MLP's activation, and its output.
The last block's output, the final norm and the head have true gradients. The embeddings get the gradient that
the first block backpropagates from its feedback (feedback_micro: its attention does).

e is taken before the vocabulary head, so that M is C x C instead of V x C."""
import torch

from layers.ops import drop_out
from model import Block
from runtime import config, distributed
from runtime.config import BadInput


def check(cfg):
    """Raise BadInput for conflicts among the options of this file and --orthogonality."""
    uses_feedback = cfg.backward != "backprop"
    if cfg.lora_rank and (uses_feedback or cfg.trained_blocks != "all" or cfg.orthogonality):
        raise BadInput("--lora_rank freezes the weights of all blocks: leave it out, or --backward, "
                       "--trained_blocks and --orthogonality.")
    if cfg.feedback_matrix != "each" and not uses_feedback:
        raise BadInput(f"--feedback_matrix={cfg.feedback_matrix} has no effect with --backward=backprop: use "
                       "--backward=feedback, or leave it out.")
    if cfg.feedback_matrix == "identity" and cfg.backward == "feedback_micro":
        raise BadInput("--feedback_matrix=identity can't map the error to the MLP, which has more channels: "
                       "use --backward=feedback, or another matrix.")
    if uses_feedback and cfg.compile_mode in distributed.CUDA_GRAPHS:
        raise BadInput(f"--compile_mode={cfg.compile_mode} compiles a step as a whole, and --backward="
                       f"{cfg.backward} needs separate blocks: use default or max-autotune-no-cudagraphs.")
    if uses_feedback and cfg.init_from == "resume" and config.read_saved(cfg.out_dir)["seed"] != cfg.seed:
        raise BadInput(f"The feedback matrices of {cfg.out_dir} were drawn with another seed than "
                       f"--seed={cfg.seed}: leave it out, or start from scratch.")
    if cfg.trained_blocks in ("none", 0) and (uses_feedback or cfg.orthogonality):
        raise BadInput("--backward and --orthogonality have no effect with --trained_blocks=none: leave one "
                       "of them out.")


def attach(model, cfg):
    """Freeze the lower blocks of a GPT and set up feedback for the others, as cfg asks."""
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
        raise BadInput("--backward=feedback has no effect on the top block, the only one that is trained: "
                       "leave it out, or train more blocks.")
    if cfg.backward == "feedback_micro":
        for block in model.blocks:
            block.__class__ = BlockInParts
    model.feedback = Feedback(model.config, cfg.backward, cfg.feedback_matrix, cfg.seed)


class BlockInParts(Block):
    """A Block that is cut after attention and after the MLP's activation."""

    def forward(self, x, cos, sin, attend):
        """Return the three feedback points, [B, T, C], [B, T, mlp_hidden] and [B, T, C]; the last is a
        Block's output."""
        y = self.attention(self.attention_norm(x), cos, sin, attend)
        attended = x + drop_out(y, self.dropout, self.training)
        x = attended.detach()
        activated = self.mlp.activation(self.mlp_norm(x))
        y = self.mlp.down(activated.detach())
        return attended, activated, x + drop_out(y, self.dropout, self.training)


class Feedback:
    """The feedback matrices. They depend only on the seed, so all ranks and resumed runs draw the same
    ones."""

    def __init__(self, shape, backward, matrix, seed):
        """shape: GPTConfig. backward, matrix, seed: the options backward, feedback_matrix and seed."""
        C = shape.n_embd
        self.n_layer = shape.n_layer
        self.channels = C
        self.widths = [C] if backward == "feedback" else [C, shape.mlp_hidden, C]        # of a block's points
        self.matrix = matrix
        self.seed = seed
        self.drawn = None                    # see matrices

    def matrices(self, device):
        """Return a list per block of the matrices of its points, fp32 [C, channels of the point]. None is the
        identity: for the last block's output, and for all points with feedback_matrix=identity."""
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
        """Return a random matrix, fp32 [C, width], that preserves the norm of an error on average."""
        return torch.randn(self.channels, width, generator=generator) * width**-0.5

    def pending_bytes(self):
        """Return the bytes that the matrices will take; 0 once they are drawn."""
        if self.drawn or self.matrix == "identity":
            return 0
        widths = set(self.widths) if self.matrix == "shared" else self.widths * self.n_layer
        top = 0 if self.matrix == "shared" else self.channels
        return 4 * self.channels * (sum(widths) - top)

    def flops_per_token(self):
        """Return the FLOPs of the products with the matrices, in addition to backpropagation's. The product
        for an MLP's activation replaces that of the MLP's second layer."""
        points = self.n_layer * min(2, len(self.widths)) - 1
        return 0 if self.matrix == "identity" else 2 * self.channels**2 * points

    def start(self, model):
        """Return the ForwardPass for a new forward pass."""
        return ForwardPass(self, distributed.is_spread(model))


class ForwardPass:
    """One forward pass: GPT.hidden calls it with each block's outputs and passes the result to the next
    block.

    The wire carries the error from the top to the lower blocks through autograd: a second output of each
    block's InjectFeedback, which takes no memory and is an input of the next block's."""

    def __init__(self, feedback, is_spread):
        self.feedback = feedback
        self.is_spread = is_spread
        self.block = 0                       # index of the next block
        self.wire = None

    def __call__(self, points):
        """Return the next block's input [B, T, C]. points: a block's output [B, T, C], or a tuple that ends
        with it."""
        points = points if isinstance(points, tuple) else (points,)
        if not torch.is_grad_enabled():
            return points[-1]
        matrices = self.feedback.matrices(points[-1].device)[self.block]
        self.block += 1
        is_top = self.block == self.feedback.n_layer
        h, self.wire = InjectFeedback.apply(matrices, is_top, self.wire, *points)
        # FSDP reshards a block when the gradient of its input arrives; InjectFeedback then ignores it.
        return h if is_top or self.is_spread else h.detach()


class InjectFeedback(torch.autograd.Function):
    """Forward: the identity. Backward: replaces the gradients of a block's points by the error at the top
    times their matrices."""

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
            for matrix, dtype, needs_grad in zip(ctx.matrices, ctx.dtypes, ctx.needs_input_grad[3:]):
                if matrix is None or not needs_grad:               # a frozen block needs none
                    gradients.append(error if needs_grad else None)
                else:
                    gradients.append((error.float() @ matrix).to(dtype))
        return None, None, error if ctx.needs_input_grad[2] else None, *gradients
