"""The public names of Keras 3, as programs of `tf.keras` use them."""

# Modules in which every name counts as known.
WHOLE_MODULES = frozenset(
    f"keras.{name}"
    for name in (
        "applications config datasets distribution dtype_policies export ops "
        "quantizers random saving tree visualization"
    ).split()
)
# The names of each other module, from Keras 3.15.
_NAMES = """
keras: DTypePolicy FloatDTypePolicy Function Initializer Input InputSpec KerasTensor
  Layer Loss Metric Model Operation Optimizer Quantizer Regularizer RematScope
  Sequential StatelessScope SymbolicScope Variable device name_scope remat version
keras.activations: celu deserialize elu exponential gelu get glu hard_shrink
  hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu linear log_sigmoid log_softmax
  mish relu relu6 selu serialize sigmoid silu soft_shrink softmax softplus softsign
  sparse_plus sparse_sigmoid sparsemax squareplus swish tanh tanh_shrink threshold
keras.backend: backend clear_session epsilon floatx get_uid image_data_format
  is_float_dtype is_int_dtype is_keras_tensor result_type set_epsilon set_floatx
  set_image_data_format standardize_dtype
keras.callbacks: BackupAndRestore CSVLogger Callback CallbackList EarlyStopping History
  LambdaCallback LearningRateScheduler ModelCheckpoint OrbaxCheckpoint ProgbarLogger
  ReduceLROnPlateau RemoteMonitor SwapEMAWeights TensorBoard TerminateOnNaN
keras.constraints: Constraint MaxNorm MinMaxNorm NonNeg UnitNorm deserialize get
  max_norm min_max_norm non_neg serialize unit_norm
keras.initializers: Constant GlorotNormal GlorotUniform HeNormal HeUniform Identity
  IdentityInitializer Initializer LecunNormal LecunUniform Ones Orthogonal
  OrthogonalInitializer RandomNormal RandomUniform STFT STFTInitializer TruncatedNormal
  VarianceScaling Zeros constant deserialize get glorot_normal glorot_uniform he_normal
  he_uniform identity lecun_normal lecun_uniform ones orthogonal random_normal
  random_uniform serialize stft truncated_normal variance_scaling zeros
keras.layers: Activation ActivityRegularization AdaptiveAveragePooling1D
  AdaptiveAveragePooling2D AdaptiveAveragePooling3D AdaptiveMaxPooling1D
  AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add AdditiveAttention AlphaDropout Attention
  AugMix AutoContrast Average AveragePooling1D AveragePooling2D AveragePooling3D
  AvgPool1D AvgPool2D AvgPool3D BatchNormalization Bidirectional CategoryEncoding
  CenterCrop Concatenate ContrastLimitedAdaptiveHistogramEqualization Conv1D
  Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D
  ConvLSTM3D Convolution1D Convolution1DTranspose Convolution2D Convolution2DTranspose
  Convolution3D Convolution3DTranspose Cropping1D Cropping2D Cropping3D CutMix Dense
  DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense Embedding
  Equalization Flatten FlaxLayer GRU GRUCell GaussianDropout GaussianNoise
  GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalAvgPool1D
  GlobalAvgPool2D GlobalAvgPool3D GlobalMaxPool1D GlobalMaxPool2D GlobalMaxPool3D
  GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization
  GroupQueryAttention HashedCrossing Hashing Identity Input InputLayer InputSpec
  IntegerLookup JaxLayer LSTM LSTMCell Lambda Layer LayerNormalization LeakyReLU Masking
  MaxNumBoundingBoxes MaxPool1D MaxPool2D MaxPool3D MaxPooling1D MaxPooling2D
  MaxPooling3D Maximum MelSpectrogram Minimum MixUp MultiHeadAttention Multiply
  Normalization PReLU Permute Pipeline RMSNormalization RNN RandAugment RandomBrightness
  RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop
  RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale
  RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation
  RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom ReLU
  RepeatVector Rescaling Reshape Resizing ReversibleEmbedding STFTSpectrogram
  SeparableConv1D SeparableConv2D SeparableConvolution1D SeparableConvolution2D
  SimpleRNN SimpleRNNCell Softmax Solarization SpatialDropout1D SpatialDropout2D
  SpatialDropout3D SpectralNormalization StackedRNNCells StringLookup Subtract TFSMLayer
  TextVectorization TimeDistributed TorchModuleWrapper UnitNormalization UpSampling1D
  UpSampling2D UpSampling3D Wrapper ZeroPadding1D ZeroPadding2D ZeroPadding3D add
  average concatenate deserialize dot maximum minimum multiply serialize subtract
keras.losses: BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy
  CategoricalFocalCrossentropy CategoricalGeneralizedCrossEntropy CategoricalHinge
  Circle CosineSimilarity Dice Hinge Huber KLDivergence LogCosh Loss MeanAbsoluteError
  MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson
  SparseCategoricalCrossentropy SquaredHinge Tversky binary_crossentropy
  binary_focal_crossentropy categorical_crossentropy categorical_focal_crossentropy
  categorical_generalized_cross_entropy categorical_hinge circle cosine_similarity ctc
  deserialize dice get hinge huber kl_divergence log_cosh mean_absolute_error
  mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error
  poisson serialize sparse_categorical_crossentropy squared_hinge tversky
keras.metrics: AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU
  CategoricalAccuracy CategoricalCrossentropy CategoricalHinge ConcordanceCorrelation
  CosineSimilarity F1Score FBetaScore FalseNegatives FalsePositives Hinge IoU
  KLDivergence LogCoshError Mean MeanAbsoluteError MeanAbsolutePercentageError MeanIoU
  MeanMetricWrapper MeanSquaredError MeanSquaredLogarithmicError Metric OneHotIoU
  OneHotMeanIoU PearsonCorrelation Poisson Precision PrecisionAtRecall R2Score Recall
  RecallAtPrecision RootMeanSquaredError SensitivityAtSpecificity
  SparseCategoricalAccuracy SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy
  SpecificityAtSensitivity SquaredHinge Sum TopKCategoricalAccuracy TrueNegatives
  TruePositives binary_accuracy binary_crossentropy binary_focal_crossentropy
  categorical_accuracy categorical_crossentropy categorical_focal_crossentropy
  categorical_hinge concordance_correlation deserialize get hinge huber kl_divergence
  log_cosh mean_absolute_error mean_absolute_percentage_error mean_squared_error
  mean_squared_logarithmic_error pearson_correlation poisson serialize
  sparse_categorical_accuracy sparse_categorical_crossentropy
  sparse_top_k_categorical_accuracy squared_hinge top_k_categorical_accuracy
keras.mixed_precision: DTypePolicy LossScaleOptimizer Policy dtype_policy global_policy
  set_dtype_policy set_global_policy
keras.models: Model Sequential clone_model load_model model_from_json save_model
keras.optimizers: Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion
  LossScaleOptimizer MultiOptimizer Muon Nadam Optimizer OptimizerMap RMSprop SGD
  ScheduleFreeAdamW deserialize get serialize
keras.optimizers.schedules: CosineDecay CosineDecayRestarts ExponentialDecay
  InverseTimeDecay LearningRateSchedule PiecewiseConstantDecay PolynomialDecay
  deserialize serialize
keras.preprocessing: image_dataset_from_directory text_dataset_from_directory
  timeseries_dataset_from_array
keras.preprocessing.image: array_to_img img_to_array load_img save_img smart_resize
keras.preprocessing.sequence: pad_sequences
keras.regularizers: L1 L1L2 L2 OrthogonalRegularizer Regularizer deserialize get l1
  l1_l2 l2 orthogonal_regularizer serialize
keras.utils: Config CustomObjectScope FeatureSpace Progbar PyDataset Sequence
  array_to_img audio_dataset_from_directory clear_session custom_object_scope
  deserialize_keras_object disable_interactive_logging enable_interactive_logging
  get_custom_objects get_file get_registered_name get_registered_object
  get_source_inputs image_dataset_from_directory img_to_array
  is_interactive_logging_enabled is_keras_tensor load_img model_to_dot normalize
  pack_x_y_sample_weight pad_sequences plot_model register_keras_serializable save_img
  serialize_keras_object set_random_seed split_dataset standardize_dtype
  text_dataset_from_directory timeseries_dataset_from_array to_categorical
  unpack_x_y_sample_weight
keras.wrappers: SKLearnClassifier SKLearnRegressor SKLearnTransformer
"""
NAMES_IN_KERAS: dict[str, frozenset[str]] = {
    module: frozenset(names.split())
    for module, names in (
        row.split(": ") for row in _NAMES.replace("\n  ", " ").strip().split("\n")
    )
}
