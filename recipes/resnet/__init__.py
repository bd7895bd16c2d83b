"""Image classification with a ResNet in the CIFAR form."""
