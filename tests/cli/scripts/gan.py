"""Train a small GAN: two networks, two optimizers, and noise of the legacy tensor types."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
for name, default in (("batch_size", 24), ("n_iters", 10), ("latent_dim", 16), ("img_size", 16)):
    parser.add_argument(f"--{name}", type=int, default=default)
opt = parser.parse_args()

cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
img_shape = (1, opt.img_size, opt.img_size)
torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = opt.img_size // 4
        self.l1 = nn.Linear(opt.latent_dim, 32 * self.start**2)
        self.blocks = nn.Sequential(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(32, 1, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.blocks(self.l1(z).view(len(z), 32, self.start, self.start))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        layers += [nn.Conv2d(16, 32, 3, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Flatten()]
        self.model = nn.Sequential(*layers, nn.Linear(2 * opt.img_size**2, 1))

    def forward(self, img):
        return self.model(img)


generator, discriminator, criterion = Generator(), Discriminator(), nn.BCEWithLogitsLoss()
if cuda:
    generator, discriminator, criterion = generator.cuda(), discriminator.cuda(), criterion.cuda()
if torch.cuda.device_count() > 1:
    generator, discriminator = nn.DataParallel(generator), nn.DataParallel(discriminator)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
images = torch.linspace(-1, 1, opt.img_size).expand(img_shape) + 0.1 * torch.randn(64, *img_shape)
for i in range(opt.n_iters):
    real_imgs = images[torch.randint(64, (opt.batch_size,))].type(Tensor)
    valid = Tensor(opt.batch_size, 1).fill_(1.0)
    fake = Tensor(opt.batch_size, 1).fill_(0.0)
    z = torch.randn(opt.batch_size, opt.latent_dim).type(Tensor)

    optimizer_G.zero_grad()
    gen_imgs = generator(z)
    g_loss = criterion(discriminator(gen_imgs), valid)
    g_loss.backward()
    optimizer_G.step()

    optimizer_D.zero_grad()
    real_loss = criterion(discriminator(real_imgs), valid)
    fake_loss = criterion(discriminator(gen_imgs.detach()), fake)
    d_loss = (real_loss + fake_loss) / 2
    d_loss.backward()
    optimizer_D.step()
    print(f"[{i + 1}/{opt.n_iters}] D loss {d_loss.item():.7f} G loss {g_loss.item():.7f}")
