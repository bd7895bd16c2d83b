"""Image classification with a ResNet or an AlexNet."""
