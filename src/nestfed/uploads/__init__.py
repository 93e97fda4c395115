"""What happens to uploads on their way: compression, noise, differential privacy."""

from nestfed.uploads.privacy import CentralDP, Guarantee, LocalDP, Spending, Uploads, list_transforms
from nestfed.uploads.transforms import Clip, ClipMean, GaussianNoise, Quantise, ServerNoise, Sparsify, Transform

__all__ = [
    "CentralDP",
    "Clip",
    "ClipMean",
    "GaussianNoise",
    "Guarantee",
    "LocalDP",
    "Quantise",
    "ServerNoise",
    "Sparsify",
    "Spending",
    "Transform",
    "Uploads",
    "list_transforms",
]
