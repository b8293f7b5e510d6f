"""Context parallelism: ranks share samples, each with a part of their tokens.

[Note: sums over ranks]
Everything here is differentiated as the sum of all ranks' losses: the backward of every exchange is its exact
transpose. A rank's gradient of a parameter is then the derivative of that sum by the rank's own use of the
parameter, and the mean over data- and context-parallel ranks, which ``lz.shard`` takes, is the gradient of the
*mean of the ranks' losses*. So a rank's loss has to be its share in that mean: the plain mean over local tokens where
all ranks have equally many, `mean_share` otherwise.

[Note: parts]
A dimension of length ``n`` over ``c`` ranks is cut into consecutive parts, the first ``n % c`` of them one longer than
the others. Nothing is padded: exchanges are ragged, so that lengths and heads need not divide.
"""

from layerzero.parallel.context.attention import ulysses_attention
from layerzero.parallel.context.group import ContextParallel
from layerzero.parallel.context.loss import mean_share
from layerzero.parallel.context.models import parallelize
from layerzero.parallel.context.ring import ring_attention

__all__ = ["ContextParallel", "mean_share", "parallelize", "ring_attention", "ulysses_attention"]
