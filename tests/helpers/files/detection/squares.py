import torch
from torch.utils.data import Dataset


class Squares(Dataset):
    """Bright squares on dark images of two sizes; one image of the training set has none."""

    def __init__(self, count, first, kind, label):
        self.count, self.first, self.kind, self.label = count, first, kind, label

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(self.first + i)
        height = 32 if self.kind == "pixels" else 32 + 8 * (i % 2)
        image = torch.rand(3, height, 40, generator=generator) * 0.2
        pixels = torch.zeros(height, 40, dtype=torch.long)
        boxes = []
        for _ in range(0 if self.first + i == 2 else 1 + i % 2):
            x, y = torch.randint(0, 20, (2,), generator=generator).tolist()
            image[:, y : y + 10, x : x + 10] += 0.7
            pixels[y : y + 10, x : x + 10] = 1
            boxes.append([x, y, x + 10, y + 10])
        if self.kind == "pixels":
            return image, pixels
        return image, {"boxes": boxes, "labels": [self.label] * len(boxes)}


def squares(kind="boxes", label=1):
    return Squares(6, 0, kind, label), Squares(3, 100, kind, label)


def two_lists(examples):
    images, targets = zip(*examples, strict=True)
    tensors = [
        {
            "boxes": torch.tensor(t["boxes"]).reshape(-1, 4).float(),
            "labels": torch.tensor(t["labels"], dtype=torch.long),
        }
        for t in targets
    ]
    return list(images), tensors


def stacked(examples):
    return torch.stack([image[:, :32] for image, _ in examples]), torch.ones(len(examples))
