"""What images.py prints of its progress."""


class AverageMeter:
    def __init__(self, name):
        self.name, self.value, self.total, self.count = name, 0.0, 0.0, 0

    def update(self, value, n):
        self.value, self.total, self.count = value, self.total + value * n, self.count + n

    @property
    def average(self):
        return self.total / self.count

    def __str__(self):
        return f"{self.name} {self.value:.7f} ({self.average:.3f})"


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix):
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def update(self, values, n):
        for meter, value in zip(self.meters, values, strict=True):
            meter.update(value, n)

    def display(self, batch):
        print(f"{self.prefix}[{batch}/{self.num_batches}]", *self.meters, sep="  ", flush=True)
