"""Learning-rate schedules over a fixed number of steps, on any torch optimizer."""

from colossalai.nn.lr_scheduler._annealing import CosineAnnealingLR as CosineAnnealingLR
from colossalai.nn.lr_scheduler._annealing import CosineAnnealingWarmupLR as CosineAnnealingWarmupLR
from colossalai.nn.lr_scheduler._annealing import FlatAnnealingLR as FlatAnnealingLR
from colossalai.nn.lr_scheduler._annealing import FlatAnnealingWarmupLR as FlatAnnealingWarmupLR
from colossalai.nn.lr_scheduler._decay import ExponentialLR as ExponentialLR
from colossalai.nn.lr_scheduler._decay import MultiStepLR as MultiStepLR
from colossalai.nn.lr_scheduler._decay import MultiStepWarmupLR as MultiStepWarmupLR
from colossalai.nn.lr_scheduler._decay import StepLR as StepLR
from colossalai.nn.lr_scheduler._polynomial import LinearWarmupLR as LinearWarmupLR
from colossalai.nn.lr_scheduler._polynomial import PolynomialLR as PolynomialLR
from colossalai.nn.lr_scheduler._polynomial import PolynomialWarmupLR as PolynomialWarmupLR
from colossalai.nn.lr_scheduler._torch import LambdaLR as LambdaLR
from colossalai.nn.lr_scheduler._torch import MultiplicativeLR as MultiplicativeLR
from colossalai.nn.lr_scheduler._torch import OneCycleLR as OneCycleLR
